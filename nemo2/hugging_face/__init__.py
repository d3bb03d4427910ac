# SPDX-License-Identifier: Apache-2.0
"""Files of Hugging Face's: released weights read into checkpoints and models of ours, and checkpoints written as such."""
