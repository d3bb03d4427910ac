# SPDX-License-Identifier: Apache-2.0
"""MiniMax M2: 256 experts in every layer, half of the channels rotated, and norms of queries and keys over all heads.

Source: transformers' ``MiniMaxM2Config``, whose defaults are config.json of MiniMaxAI/MiniMax-M2 but for its
``rotary_dim`` of 64.
"""

from nemo2.models.decoder import DecoderConfig, GroupedExperts
from nemo2.models.gpt import GPTModel


class MiniMaxM2Config(
    GroupedExperts,
    DecoderConfig,
    seq_length=196608,
    rotary_base=5_000_000,
    rotary_percent=0.5,
    vocab_size=200064,
    layernorm_epsilon=1e-6,
    qk_layernorm=True,
    qk_layernorm_over_heads=True,
    kv_channels=128,
    num_moe_experts=256,
    moe_router_topk=8,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_dtype="fp32",
    moe_aux_loss_coeff=1e-3,
):
    """Settings that all sizes of MiniMax M2 share."""


class MiniMaxM2Config230B_A10B(
    MiniMaxM2Config, num_layers=62, hidden_size=3072, num_attention_heads=48, num_query_groups=8, ffn_hidden_size=1536
):
    """228.7 B parameters, 10 B of them used per token."""


class MiniMaxM2Model(GPTModel):
    """The LightningModule of MiniMax M2; see `GPTModel`."""
