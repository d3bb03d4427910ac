# SPDX-License-Identifier: Apache-2.0
"""Evaluates a trained model: the perplexity of texts, and tasks."""
