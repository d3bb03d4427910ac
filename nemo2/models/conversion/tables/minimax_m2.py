# SPDX-License-Identifier: Apache-2.0
"""The conversion of MiniMax M2."""

from typing import Any

import torch

from nemo2.models.conversion.decoder import decoder_conversion
from nemo2.models.conversion.pieces import one
from nemo2.models.conversion.settings import Config, Translation, decoder_fields, expert_fields
from nemo2.models.conversion.table import Row
from nemo2.models.conversion.tables.mixtral import rows
from nemo2.models.minimax_m2 import MiniMaxM2Config, MiniMaxM2Model


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
