# SPDX-License-Identifier: Apache-2.0
"""Reads Hugging Face's files into checkpoints and models, and writes checkpoints as such files."""
