# SPDX-License-Identifier: Apache-2.0
"""The conversion of Qwen 1.5 MoE and Qwen 2 57B-A14B."""

from typing import Any

from nemo2.models.conversion.decoder import decoder_conversion
from nemo2.models.conversion.experts import (
    EXPERT_LAYERS,
    expert_weights,
    rows_with_experts,
    shared_experts,
)
from nemo2.models.conversion.pieces import one
from nemo2.models.conversion.settings import (
    DERIVED,
    FULL,
    SLIDING,
    Config,
    Field,
    Translation,
    decoder_fields,
    expert_fields,
    refusal,
)
from nemo2.models.conversion.table import Row
from nemo2.models.qwen2_moe import Qwen2MoEConfig, Qwen2MoEModel


def _refuse_windows(hf: Config) -> dict[str, Any]:
    if SLIDING in (hf.get("layer_types") or ()):
        raise refusal(hf, "layer_types", f"use_sliding_window is not set, so each layer must be {FULL!r}")
    return {}


def _rows(config: Qwen2MoEConfig) -> list[Row]:
    return rows_with_experts(config, shared_expert())


def shared_expert() -> list[Row]:
    """A layer's shared expert, and the gate of its output."""
    return [
        *shared_experts("mlp.shared_expert."),
        Row("mlp.shared_experts.gate_weight", one("mlp.shared_expert_gate.weight")),
    ]


QWEN2_MOE = decoder_conversion(
    "Qwen2MoeForCausalLM",
    Qwen2MoEModel,
    Qwen2MoEConfig,
    rows=_rows,
    fields=[
        *decoder_fields(head_dim=DERIVED, num_key_value_heads=16, max_position_embeddings=32768),
        Field("qkv_bias", "add_qkv_bias", True),
        *expert_fields(
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
            num_experts=60,
            num_experts_per_tok=4,
            router_aux_loss_coef=0.001,
        ),
    ],
    only={"model_type": "qwen2_moe", "hidden_act": "silu", "use_sliding_window": False},
    translations=[Translation(_refuse_windows), EXPERT_LAYERS, expert_weights()],
)
