# SPDX-License-Identifier: Apache-2.0
"""The names and the layout of a family's tensors and settings in Hugging Face's files: one table per family, for
both directions."""
