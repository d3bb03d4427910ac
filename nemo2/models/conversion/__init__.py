# SPDX-License-Identifier: Apache-2.0
"""How a family's tensors and settings are called and cut in Hugging Face's files: a table per family, for both directions."""
