# SPDX-License-Identifier: Apache-2.0
"""Llama 4's text model, by itself or inside a vision model."""

from dataclasses import replace
from typing import Any

from nemo2.models.conversion.llama import SCALING, attention, decoder
from nemo2.models.conversion.pieces import cat, one
from nemo2.models.conversion.positions import rope_fields, rope_of, scaled
from nemo2.models.conversion.settings import (
    Config,
    Field,
    decoder_fields,
    meaning,
    read,
    refusal,
    said,
    text_config,
    without,
    written,
)
from nemo2.models.conversion.table import Conversion, Row, linear, norm
from nemo2.models.llama import LlamaModel
from nemo2.models.llama4 import Llama4Config

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
]
_ONLY = {"model_type": "llama4_text", "hidden_act": "silu", "attention_bias": False, "num_experts_per_tok": 1}
_SCALING = {theirs: (ours.replace("scale_factor", "rope_scaling_factor"), d) for theirs, (ours, d) in SCALING.items()}


def rows(config: Llama4Config) -> list[Row]:
    flags = meaning(config)["experts_in"]
    dense = [layer for layer, experts_here in enumerate(flags) if not experts_here]
    sparse = [layer for layer, experts_here in enumerate(flags) if experts_here]
    layer = [
        *attention(config),
        *(replace(row, layers=dense) for row in _feed_forward()),
        *(replace(row, layers=sparse) for row in _experts()),
    ]
    return decoder(config, layer)


def _feed_forward() -> list[Row]:
    return [
        *norm("mlp.linear_fc1.layer_norm_", one("post_attention_layernorm.")),
        *linear("mlp.linear_fc1.", cat("feed_forward.gate_proj.", "feed_forward.up_proj.")),
        *linear("mlp.linear_fc2.", one("feed_forward.down_proj.")),
    ]


def _experts() -> list[Row]:
    """Experts are stacked and stored [in, out]."""
    stacked, shared = "feed_forward.experts.", "feed_forward.shared_expert."
    return [
        *norm("pre_mlp_layernorm.", one("post_attention_layernorm.")),
        Row("mlp.router.weight", one("feed_forward.router.weight")),
        Row("mlp.experts.experts.linear_fc1.weight", one(f"{stacked}gate_up_proj", stacked=True, transposed=True)),
        Row("mlp.experts.experts.linear_fc2.weight", one(f"{stacked}down_proj", stacked=True, transposed=True)),
        *linear("mlp.shared_experts.linear_fc1.", cat(f"{shared}gate_proj.", f"{shared}up_proj.")),
        *linear("mlp.shared_experts.linear_fc2.", one(f"{shared}down_proj.")),
    ]


def config(hf: Config) -> Llama4Config:
    told = text_config(hf)
    fields = read(told, _FIELDS, only=_ONLY)
    layers = fields["num_layers"]
    rope = rope_of(told, theta=500_000.0, kinds=("default", "llama3"))
    scaling = {"rope_scaling": rope.kind == "llama3", **(scaled(told, rope, _SCALING) if rope.kind == "llama3" else {})}
    rotated = told.get("no_rope_layers") or [
        int((n + 1) % told.get("no_rope_layer_interval", 4) != 0) for n in range(layers)
    ]
    types = told.get("layer_types")
    if types and types != ["chunked_attention" if flag else "full_attention" for flag in rotated]:
        raise refusal(
            told, "layer_types", "nemo2's layers attend in chunks exactly if they rotate positions (no_rope_layers)"
        )
    step = told.get("interleave_moe_layer_step", 1)
    experts_in = told.get("moe_layers")
    experts_in = list(range(step - 1, layers, step)) if experts_in is None else experts_in
    return Llama4Config(
        **fields,
        **scaling,
        rotary_base=rope.theta,
        moe_layer_freq=[int(n in experts_in) for n in range(layers)] if len(experts_in) < layers else 1,
        moe_shared_expert_intermediate_size=fields["moe_ffn_hidden_size"],
        no_rope_freq=[int(not flag) for flag in rotated],
        attention_chunk_size=told.get("attention_chunk_size", 8192),
        # max_position_embeddings is a limit for inference, not the length of training sequences.
        seq_length=min(told.get("max_position_embeddings", 131072), 8192),
        attn_temperature_tuning=bool(told.get("attn_temperature_tuning", True)),
    )


def hf_config(ours: Llama4Config) -> dict[str, Any]:
    told = meaning(ours)
    rotated = [int(not flag) for flag in told["without_positions"] or [0] * ours.num_layers]
    scaling = {theirs: getattr(ours, name) for theirs, (name, _) in _SCALING.items()}
    hf = {
        **written(ours, _FIELDS, only=_ONLY),
        "max_position_embeddings": ours.seq_length,
        "attention_chunk_size": ours.attention_chunk_size,
        "attn_temperature_tuning": ours.attn_temperature_tuning,
        "no_rope_layers": rotated,
        "layer_types": ["chunked_attention" if flag else "full_attention" for flag in rotated],
        "moe_layers": [layer for layer, experts in enumerate(told["experts_in"] or []) if experts],
        **(
            rope_fields(ours.rotary_base, kind="llama3", **scaling)
            if ours.rope_scaling
            else rope_fields(ours.rotary_base)
        ),
    }
    return said(ours, hf, config)


LLAMA4 = Conversion(
    architectures=("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    model=LlamaModel,
    configs=(Llama4Config,),
    rows=rows,
    config=config,
    hf_config=hf_config,
    ignored=("*vision_model.*", "*multi_modal_projector.*"),
    prefixes=("", "language_model."),
    renamed=(("model.language_model.", "model."),),
)
