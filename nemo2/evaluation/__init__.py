# SPDX-License-Identifier: Apache-2.0
"""How good a trained model is: perplexity of texts."""
