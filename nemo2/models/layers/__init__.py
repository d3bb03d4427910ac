# SPDX-License-Identifier: Apache-2.0
"""Transformer layers in plain PyTorch: what runs where Transformer Engine cannot."""

from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer.utils import openai_gelu

from nemo2.models.layers.attention import SDPAttention
from nemo2.models.layers.experts import TorchGroupedMLP
from nemo2.models.layers.mla import LocalMLA
from nemo2.models.layers.mtp import answer_without_labels, leave_out_padding, weigh_further_losses
from nemo2.models.layers.norm import TorchNorm
from nemo2.models.layers.rules import layer_problems
from nemo2.models.layers.softcap import cap_logits
from nemo2.models.layers.spec import layer_spec, local_layer_spec, mtp_block_spec, with_weighted_routers
from nemo2.models.layers.vocabulary import mask_padding

__all__ = [
    "LocalMLA",
    "SDPAttention",
    "TorchGroupedMLP",
    "TorchNorm",
    "answer_without_labels",
    "cap_logits",
    "layer_problems",
    "layer_spec",
    "local_layer_spec",
    "leave_out_padding",
    "mask_padding",
    "mtp_block_spec",
    "openai_gelu",
    "quick_gelu",
    "squared_relu",
    "weigh_further_losses",
    "with_weighted_routers",
]
