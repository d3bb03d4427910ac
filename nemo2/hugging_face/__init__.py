# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's files: released weights are read into checkpoints and models, and checkpoints are written as such
files."""
