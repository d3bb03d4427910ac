# SPDX-License-Identifier: Apache-2.0
"""MiniMax M2: 256 experts in every layer, half of the channels rotated, and norms of queries and keys over all heads.

Source: transformers' ``MiniMaxM2Config``, whose defaults are config.json of MiniMaxAI/MiniMax-M2 but for its
``rotary_dim`` of 64.
"""

from dataclasses import dataclass
from typing import Any, Literal, Optional, Union

import torch

from nemo2.config.capture import configurable
from nemo2.models.conversion.decoder import decoder_conversion
from nemo2.models.conversion.pieces import one
from nemo2.models.conversion.settings import Config, Translation, decoder_fields, expert_fields
from nemo2.models.conversion.table import Row
from nemo2.models.decoder import DecoderConfig, GroupedExperts
from nemo2.models.gpt import GPTModel
from nemo2.models.mixtral import rows


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


def _rows(config: MiniMaxM2Config) -> list[Row]:
    bias = one("model.layers.*.block_sparse_moe.e_score_correction_bias")
    return [*rows(config), Row("decoder.layers.*.mlp.router.expert_bias", bias, dtype=torch.float32)]


def _rotated(hf: Config) -> dict[str, Any]:
    """The release names the number of rotated channels."""
    return {"rotary_percent": hf["rotary_dim"] / hf.get("head_dim", 128)} if hf.get("rotary_dim") else {}


MINIMAX_M2 = decoder_conversion(
    "MiniMaxM2ForCausalLM",
    MiniMaxM2Model,
    MiniMaxM2Config,
    rows=_rows,
    fields=[
        *decoder_fields(num_key_value_heads=8, head_dim=128, max_position_embeddings=196608),
        *expert_fields(num_local_experts=256, num_experts_per_tok=8, router_aux_loss_coef=0.001),
    ],
    only={"model_type": "minimax_m2", "hidden_act": "silu", "router_jitter_noise": 0.0},
    translations=[Translation(_rotated)],
    theta=5_000_000.0,
    partial=1.0,
)
