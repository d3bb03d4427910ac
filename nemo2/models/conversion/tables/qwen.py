# SPDX-License-Identifier: Apache-2.0
"""The conversions of Qwen 1.5, 2, 2.5 and 3, dense and with experts."""

from typing import Any

from nemo2.models.conversion.decoder import decoder_conversion, rows
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
    layer_types,
    overlaid,
    pattern_of,
    refusal,
    size_of,
    window_of,
)
from nemo2.models.conversion.table import Row
from nemo2.models.qwen2 import Qwen2Config, Qwen2Model
from nemo2.models.qwen2_moe import Qwen2MoEConfig, Qwen2MoEModel
from nemo2.models.qwen3 import Qwen3Config, Qwen3Model, Qwen3MoEConfig

_FIELDS = decoder_fields(head_dim=DERIVED, num_key_value_heads=32, max_position_embeddings=32768)
_QWEN2_ONLY = {"model_type": "qwen2", "hidden_act": "silu"}


def _windows(hf: Config) -> dict[str, Any]:
    """nemo2's settings for ``sliding_window``, which applies to the layers from ``max_window_layers`` on if
    ``use_sliding_window`` is set."""
    if not hf.get("use_sliding_window") or hf.get("sliding_window", 4096) is None:
        return {}
    first, count = hf.get("max_window_layers", 28), hf["num_hidden_layers"]
    types = hf.get("layer_types") or [SLIDING if layer >= first else FULL for layer in range(count)]
    if SLIDING not in types:
        return {}
    return {
        "window_size": window_of(hf.get("sliding_window", 4096)),
        "window_attn_skip_freq": pattern_of(hf, types),
        # Transformer Engine supports windows with context parallelism only by all-to-all.
        "cp_comm_type": "a2a",
    }


def _windows_of(ours: Any) -> dict[str, Any]:
    types = layer_types(ours)
    return {
        "use_sliding_window": SLIDING in types,
        "sliding_window": size_of(ours.window_size),
        "max_window_layers": types.index(SLIDING) if SLIDING in types else len(types),
        "layer_types": types,
    }


WINDOWS = Translation(_windows, _windows_of)
QWEN2 = decoder_conversion(
    "Qwen2ForCausalLM",
    Qwen2Model,
    Qwen2Config,
    rows=rows,
    fields=_FIELDS,
    only=_QWEN2_ONLY,
    translations=[WINDOWS],
    biased=("add_qkv_bias",),
)


def _refuse_windows(hf: Config) -> dict[str, Any]:
    if SLIDING in (hf.get("layer_types") or ()):
        raise refusal(hf, "layer_types", f"use_sliding_window is not set, so each layer must be {FULL!r}")
    return {}


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
    rows=lambda config: rows_with_experts(config, shared_expert()),
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


_LONGEST = Field("max_position_embeddings", "max_position_embeddings", 32768)
_QWEN3_ONLY = {"model_type": "qwen3", "hidden_act": "silu", "attention_bias": False}


QWEN3 = decoder_conversion(
    "Qwen3ForCausalLM",
    Qwen3Model,
    Qwen3Config,
    rows=rows,
    fields=[*decoder_fields(num_key_value_heads=32, head_dim=128, max_position_embeddings=32768), _LONGEST],
    only=_QWEN3_ONLY,
    translations=[WINDOWS],
)


def _named_as_before(hf: Config) -> Config:
    """transformers 5 writes the number of experts under Mixtral's name."""
    renamed = "num_local_experts" in hf and "num_experts" not in hf
    return overlaid(hf, num_experts=hf["num_local_experts"]) if renamed else hf


# Whatever else config.json says, transformers' class has the window in all layers or in none.
_WINDOW = Translation(lambda hf: WINDOWS.ours(overlaid(hf, max_window_layers=0, layer_types=None)), WINDOWS.theirs)
QWEN3_MOE = decoder_conversion(
    "Qwen3MoeForCausalLM",
    Qwen3Model,
    Qwen3MoEConfig,
    rows=rows_with_experts,
    fields=[
        *decoder_fields(num_key_value_heads=4, max_position_embeddings=32768),
        _LONGEST,
        *expert_fields(moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, router_aux_loss_coef=0.001),
    ],
    only=_QWEN3_ONLY | {"model_type": "qwen3_moe"},
    translations=[_WINDOW, expert_weights(), EXPERT_LAYERS],
    flat=_named_as_before,
)
