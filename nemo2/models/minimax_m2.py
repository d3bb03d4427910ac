# SPDX-License-Identifier: Apache-2.0
"""MiniMax M2: 256 experts in every layer, half of the channels rotated, and norms of queries and keys over all heads.

Source: transformers' ``MiniMaxM2Config``, whose defaults are config.json of MiniMaxAI/MiniMax-M2 but for its
``rotary_dim`` of 64.
"""

from dataclasses import dataclass
from typing import Literal, Optional, Union

from nemo2.config.capture import configurable
from nemo2.models.decoder import DecoderConfig, GroupedExperts
from nemo2.models.gpt import GPTModel


@configurable
@dataclass
class MiniMaxM2Config(GroupedExperts, DecoderConfig):
    """Settings that all sizes of MiniMax M2 share."""

    seq_length: int = 196608
    rotary_base: int = 5_000_000
    rotary_percent: float = 0.5
    vocab_size: Optional[int] = 200064
    layernorm_epsilon: float = 1e-6
    qk_layernorm: bool = True
    qk_layernorm_over_heads: bool = True
    kv_channels: Optional[int] = 128
    num_moe_experts: Optional[int] = 256
    moe_router_topk: int = 8
    moe_router_score_function: Literal["softmax", "sigmoid"] = "sigmoid"
    moe_router_enable_expert_bias: bool = True
    moe_router_dtype: Optional[Literal["fp32", "fp64"]] = "fp32"
    moe_aux_loss_coeff: Union[float, list[float]] = 1e-3


class MiniMaxM2Config230B_A10B(
    MiniMaxM2Config, num_layers=62, hidden_size=3072, num_attention_heads=48, num_query_groups=8, ffn_hidden_size=1536
):
    """228.7 B parameters, 10 B of them used per token."""


@configurable
class MiniMaxM2Model(GPTModel):
    """The LightningModule of MiniMax M2; see `GPTModel`."""
