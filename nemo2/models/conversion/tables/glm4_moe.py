# SPDX-License-Identifier: Apache-2.0
"""The conversion of GLM-4.5 and 4.6."""

from typing import Any

from nemo2.models.conversion.decoder import attention, decoder_conversion
from nemo2.models.conversion.experts import (
    FURTHER_PREDICTIONS,
    REPEATED,
    beside_experts,
    check_routing,
    dense_then_experts,
    further_predictions,
    rows_with_experts,
)
from nemo2.models.conversion.settings import Config, Field, Translation, decoder_fields, expert_fields
from nemo2.models.conversion.table import Row
from nemo2.models.glm4_moe import GLM4MoEConfig, GLM4MoEModel


def _rows(config: GLM4MoEConfig) -> list[Row]:
    return rows_with_experts(config, beside_experts(config)) + further_predictions(config, attention(config))


_GROUPS = {"n_group": "moe_router_num_groups", "topk_group": "moe_router_group_topk"}


def _groups(hf: Config) -> dict[str, Any]:
    groups = {ours: hf.get(theirs, 1) for theirs, ours in _GROUPS.items()}
    check_routing(hf, {"moe_router_topk": hf.get("num_experts_per_tok", 8), **groups})
    return groups


def _groups_of(ours: GLM4MoEConfig) -> dict[str, Any]:
    return {theirs: getattr(ours, name) or 1 for theirs, name in _GROUPS.items()}


GLM4_MOE = decoder_conversion(
    "Glm4MoeForCausalLM",
    GLM4MoEModel,
    GLM4MoEConfig,
    rows=_rows,
    fields=[
        *decoder_fields(num_key_value_heads=8, rms_norm_eps=1e-5, max_position_embeddings=131072),
        Field("attention_bias", "add_qkv_bias", False),
        Field("use_qk_norm", "qk_layernorm", False),
        *expert_fields(
            n_routed_experts=128, num_experts_per_tok=8, moe_intermediate_size=1408, routed_scaling_factor=1.0
        ),
    ],
    only={"model_type": "glm4_moe", "hidden_act": "silu", "norm_topk_prob": True},
    translations=[
        Translation(_groups, _groups_of),
        dense_then_experts(1408, default=1),
        FURTHER_PREDICTIONS,
    ],
    partial=0.5,
    ignored=REPEATED,
)
