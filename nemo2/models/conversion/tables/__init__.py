# SPDX-License-Identifier: Apache-2.0
"""The conversion of each family between nemo2's checkpoints and Hugging Face's files, in a file for the family and its siblings."""
