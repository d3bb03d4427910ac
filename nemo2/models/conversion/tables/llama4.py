# SPDX-License-Identifier: Apache-2.0
"""The conversion of The text models of Llama 4 Scout."""

from typing import Any

from nemo2.models.conversion.decoder import attention, decoder, decoder_conversion, feed_forward
from nemo2.models.conversion.experts import dense_or_experts, shared_experts
from nemo2.models.conversion.pieces import cat, one
from nemo2.models.conversion.positions import own_scaling
from nemo2.models.conversion.settings import (
    Config,
    Field,
    Translation,
    decoder_fields,
    refusal,
    rotated_layers,
    text_config,
    without,
)
from nemo2.models.conversion.table import IN_VISION_MODEL, Row, norm
from nemo2.models.conversion.tables.llama import SCALING
from nemo2.models.llama import LlamaModel
from nemo2.models.llama4 import Llama4Config
from nemo2.models.walker import expert_layers

_FIELDS = [
    *without(
        decoder_fields(num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5),
        "intermediate_size",
        "max_position_embeddings",
    ),
    Field("intermediate_size", "moe_ffn_hidden_size", 8192),
    Field("intermediate_size_mlp", "ffn_hidden_size", 16384),
    Field("num_local_experts", "num_moe_experts", 16),
    Field("use_qk_norm", "qk_l2_norm", True),
    Field("floor_scale", "floor_scale", 8192),
    Field("attn_scale", "attn_scale", 0.1),
    Field("attention_chunk_size", "attention_chunk_size", 8192),
]
_ONLY = {"model_type": "llama4_text", "hidden_act": "silu", "attention_bias": False, "num_experts_per_tok": 1}
_SCALING = {theirs: (ours.replace("scale_factor", "rope_scaling_factor"), d) for theirs, (ours, d) in SCALING.items()}


def _rows(config: Llama4Config) -> list[Row]:
    gate_and_up = cat("feed_forward.gate_proj.", "feed_forward.up_proj.")
    dense = feed_forward(gate_and_up, "feed_forward.down_proj.")
    return decoder(config, [*attention(config), *dense_or_experts(config, dense=dense, experts=_experts())])


def _experts() -> list[Row]:
    """Experts are stacked and stored [in, out]."""
    stacked = "feed_forward.experts."
    return [
        *norm("pre_mlp_layernorm.", one("post_attention_layernorm.")),
        Row("mlp.router.weight", one("feed_forward.router.weight")),
        Row("mlp.experts.experts.linear_fc1.weight", one(f"{stacked}gate_up_proj", stacked=True, transposed=True)),
        Row("mlp.experts.experts.linear_fc2.weight", one(f"{stacked}down_proj", stacked=True, transposed=True)),
        *shared_experts("feed_forward.shared_expert."),
    ]


def _ours(text: Config) -> dict[str, Any]:
    layers = text["num_hidden_layers"]
    rotated = text.get("no_rope_layers") or [
        int((n + 1) % text.get("no_rope_layer_interval", 4) != 0) for n in range(layers)
    ]
    types = text.get("layer_types")
    if types and types != ["chunked_attention" if flag else "full_attention" for flag in rotated]:
        raise refusal(
            text, "layer_types", "nemo2's layers attend in chunks exactly if they rotate positions (no_rope_layers)"
        )
    step = text.get("interleave_moe_layer_step", 1)
    experts_in = text.get("moe_layers")
    experts_in = list(range(step - 1, layers, step)) if experts_in is None else experts_in
    return {
        "moe_layer_freq": [int(n in experts_in) for n in range(layers)] if len(experts_in) < layers else 1,
        "moe_shared_expert_intermediate_size": text.get("intermediate_size", 8192),
        "no_rope_freq": [int(not flag) for flag in rotated],
        # max_position_embeddings is a limit for inference, not the length of training sequences.
        "seq_length": min(text.get("max_position_embeddings", 131072), 8192),
        "attn_temperature_tuning": bool(text.get("attn_temperature_tuning", True)),
    }


def _theirs(ours: Llama4Config) -> dict[str, Any]:
    rotated = rotated_layers(ours)
    return {
        "max_position_embeddings": ours.seq_length,
        "attn_temperature_tuning": ours.attn_temperature_tuning,
        "no_rope_layers": rotated,
        "layer_types": ["chunked_attention" if flag else "full_attention" for flag in rotated],
        "moe_layers": [layer for layer, experts in enumerate(expert_layers(ours)) if experts],
    }


LLAMA4 = decoder_conversion(
    "Llama4ForCausalLM",
    LlamaModel,
    Llama4Config,
    rows=_rows,
    fields=_FIELDS,
    only=_ONLY,
    translations=[Translation(_ours, _theirs)],
    rotary=own_scaling("llama3", _SCALING, on={"rope_scaling": True}, off={"rope_scaling": False}, theta=500_000.0),
    flat=text_config,
    also=("Llama4ForConditionalGeneration",),
    **IN_VISION_MODEL,
)
