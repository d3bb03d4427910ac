# SPDX-License-Identifier: Apache-2.0
"""Qwen 3, dense and with experts."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nemo2.models.conversion.decoder import decoder_conversion
from nemo2.models.conversion.llama import attention, decoder, gated_feed_forward, rows
from nemo2.models.conversion.pieces import cat, one
from nemo2.models.conversion.positions import KINDS, positions, positions_of, rope_of
from nemo2.models.conversion.qwen2 import windows, windows_of
from nemo2.models.conversion.settings import Config, Field, decoder_fields, meaning, read, said, written
from nemo2.models.conversion.table import Conversion, Row, linear, norm
from nemo2.models.qwen3 import Qwen3Config, Qwen3Model, Qwen3MoEConfig

_FIELDS = decoder_fields(num_key_value_heads=32, head_dim=128, max_position_embeddings=32768)
_EXPERTS = [
    *decoder_fields(num_key_value_heads=4, max_position_embeddings=32768),
    Field("moe_intermediate_size", "moe_ffn_hidden_size", 768),
    Field("num_experts", "num_moe_experts", 128),
    Field("num_experts_per_tok", "moe_router_topk", 8),
    Field("router_aux_loss_coef", "moe_aux_loss_coeff", 0.001),
]
_ONLY = {"model_type": "qwen3", "hidden_act": "silu", "attention_bias": False}


def rows_with_experts(config: Any, further: Sequence[Row] = ()) -> list[Row]:
    """A model with these attention layers, experts in some layers and a feed-forward in the others. ``further`` are rows of the
    layers with experts."""
    with_experts = meaning(config)["experts_in"]
    dense = [layer for layer, experts in enumerate(with_experts) if not experts]
    sparse = [layer for layer, experts in enumerate(with_experts) if experts]
    layer = [
        *attention(config),
        *(replace(row, layers=dense) for row in gated_feed_forward()),
        *(replace(row, layers=sparse) for row in (*experts(), *further)),
    ]
    return decoder(config, layer)


def experts() -> list[Row]:
    """A layer's norm, router and experts, under names that DeepSeek shares."""
    expert = "mlp.experts.*."
    return [
        *norm("pre_mlp_layernorm.", one("post_attention_layernorm.")),
        Row("mlp.router.weight", one("mlp.gate.weight")),
        *linear("mlp.experts.experts.linear_fc1.", cat(f"{expert}gate_proj.", f"{expert}up_proj.")),
        *linear("mlp.experts.experts.linear_fc2.", one(f"{expert}down_proj.")),
    ]


def config_with_experts(hf: Config) -> Qwen3MoEConfig:
    # transformers 5 writes the number of experts under Mixtral's name.
    named = {"num_experts": hf["num_local_experts"], **hf} if "num_local_experts" in hf else hf
    fields = read(named, _EXPERTS, only=_ONLY | {"model_type": "qwen3_moe"})
    return Qwen3MoEConfig(
        **fields,
        # Whatever else config.json says, transformers' class has the window in all layers or in none.
        **windows({**hf, "max_window_layers": 0, "layer_types": None}),
        **_longest(hf),
        **positions(hf, rope_of(hf, kinds=KINDS), longest=fields["seq_length"]),
        moe_router_pre_softmax=not hf.get("norm_topk_prob", False),
        **expert_layers(hf),
    )


def hf_config_with_experts(ours: Qwen3MoEConfig) -> dict[str, Any]:
    hf = {
        **written(ours, _EXPERTS, only=_ONLY | {"model_type": "qwen3_moe"}),
        **_longest_of(ours),
        **windows_of(ours),
        **positions_of(ours),
        "norm_topk_prob": not ours.moe_router_pre_softmax,
        **expert_layers_of(ours),
    }
    return said(ours, hf, config_with_experts)


def expert_layers(hf: Config) -> dict[str, Any]:
    """nemo2's setting for the layers without experts, which Qwen 2's models of experts name as well."""
    dense, step = hf.get("mlp_only_layers") or [], hf.get("decoder_sparse_step", 1)
    experts_in = [int(n not in dense and (n + 1) % step == 0) for n in range(hf["num_hidden_layers"])]
    return {"moe_layer_freq": 1 if all(experts_in) else experts_in}


def expert_layers_of(ours: Any) -> dict[str, Any]:
    """The inverse of `expert_layers`."""
    dense = [layer for layer, experts in enumerate(meaning(ours)["experts_in"]) if not experts]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def _longest(hf: Config) -> dict[str, Any]:
    return {"max_position_embeddings": hf.get("max_position_embeddings", 32768)}


def _longest_of(ours: Qwen3Config) -> dict[str, Any]:
    return {"max_position_embeddings": ours.max_position_embeddings}


QWEN3 = decoder_conversion(
    "Qwen3ForCausalLM",
    Qwen3Model,
    Qwen3Config,
    rows=rows,
    fields=_FIELDS,
    only=_ONLY,
    ours=lambda hf: {**windows(hf), **_longest(hf)},
    theirs=lambda ours: {**windows_of(ours), **_longest_of(ours)},
)

QWEN3_MOE = Conversion(
    architectures=("Qwen3MoeForCausalLM",),
    model=Qwen3Model,
    configs=(Qwen3MoEConfig,),
    rows=rows_with_experts,
    config=config_with_experts,
    hf_config=hf_config_with_experts,
)
