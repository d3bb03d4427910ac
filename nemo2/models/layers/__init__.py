# SPDX-License-Identifier: Apache-2.0
"""Transformer layers in plain PyTorch: what runs where Transformer Engine cannot."""

from nemo2.models.layers.attention import SDPAttention
from nemo2.models.layers.norm import TorchNorm
from nemo2.models.layers.spec import layer_spec, local_layer_spec

__all__ = ["SDPAttention", "TorchNorm", "layer_spec", "local_layer_spec"]
