# SPDX-License-Identifier: Apache-2.0
"""Transformer layers in plain PyTorch: what runs where Transformer Engine cannot. `spec` builds a model's layers of them."""
