# SPDX-License-Identifier: Apache-2.0
"""The conversions of the families between nemo2's checkpoints and Hugging Face's files; siblings share a file."""
