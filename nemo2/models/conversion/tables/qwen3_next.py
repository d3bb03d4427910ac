# SPDX-License-Identifier: Apache-2.0
"""The conversion of Qwen3-Next and the text models of Qwen 3.5."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from nemo2.models.conversion.decoder import attention, decoder, decoder_conversion, gated_feed_forward
from nemo2.models.conversion.experts import (
    EXPERT_LAYERS,
    dense_or_experts,
    expert_weights,
    experts,
)
from nemo2.models.conversion.pieces import one, strided
from nemo2.models.conversion.settings import (
    FULL,
    Config,
    Field,
    Translation,
    decoder_fields,
    expert_fields,
    kinds_of_layers,
    must_be,
    pattern_of,
    text_config,
    without,
)
from nemo2.models.conversion.table import IN_VISION_MODEL, Row, linear, norm
from nemo2.models.conversion.tables.qwen import shared_expert
from nemo2.models.qwen3_next import Qwen3NextConfig, Qwen3NextModel, Qwen35Config, Qwen35MoEConfig

_Projection = Callable[[Qwen35Config], dict[str, Any]]
LINEAR = "linear_attention"


def _table(config: Qwen35Config, projection: _Projection, *, stacked: bool = False) -> list[Row]:
    """A model whose layers have one of two kinds of attention, and a feed-forward or experts."""
    is_linear = config.layers_with_linear_attention
    kinds = {True: _delta_net(config, projection), False: attention(config)}
    of_attention = [
        replace(row, layers=[layer for layer, flag in enumerate(is_linear) if flag is kind])
        for kind, part in kinds.items()
        for row in part
    ]
    if not config.num_moe_experts:
        return decoder(config, [*of_attention, *gated_feed_forward()])
    with_experts = [*experts(stacked=stacked), *shared_expert()]
    return decoder(config, [*of_attention, *dense_or_experts(config, dense=gated_feed_forward(), experts=with_experts)])


def _delta_net(config: Qwen35Config, projection: _Projection) -> list[Row]:
    """Megatron-Core stores the parts of the first projection and of the convolution separately."""
    keys, ours, theirs = _widths(config)["query"], "self_attention.", "linear_attn."
    convolved = {"query": 0, "key": keys, "value": 2 * keys}
    return [
        *norm(f"{ours}in_proj.layer_norm_", one("input_layernorm.")),
        *(Row(f"{ours}in_proj.weight.{part}", operation) for part, operation in projection(config).items()),
        *(Row(f"{ours}conv1d.weight.{part}", one(f"{theirs}conv1d.weight", at)) for part, at in convolved.items()),
        *(Row(f"{ours}{name}", one(f"{theirs}{name}")) for name in ("A_log", "dt_bias")),
        Row(f"{ours}out_norm.weight", one(f"{theirs}norm.weight")),
        *linear(f"{ours}out_proj.", one(f"{theirs}out_proj.")),
    ]


def _widths(config: Any) -> dict[str, int]:
    """The rows of the parts of the first projection."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values, heads = config.linear_num_value_heads * config.linear_value_head_dim, config.linear_num_value_heads
    return {"query": keys, "key": keys, "value": values, "z": values, "beta": heads, "alpha": heads}


def _by_key_head(config: Qwen35Config) -> dict[str, Any]:
    """Qwen3-Next's two matrices hold for each key head its query, its key, and the values and gates of its value heads; and its
    value heads' beta and alpha."""
    heads, parts = config.linear_num_key_heads or 1, {}
    lengths = {part: rows // heads for part, rows in _widths(config).items()}
    for name, names in {"qkvz": ("query", "key", "value", "z"), "ba": ("beta", "alpha")}.items():
        step, start = sum(lengths[part] for part in names), 0
        for part in names:
            parts[part] = strided(f"linear_attn.in_proj_{name}.weight", start, length=lengths[part], step=step)
            start += lengths[part]
    return parts


def _one_by_one(config: Qwen35Config) -> dict[str, Any]:
    """Qwen 3.5's matrices, the first of which has queries, keys and values one below the other."""
    name, keys = "linear_attn.in_proj_{}.weight", _widths(config)["query"]
    stacked = {part: one(name.format("qkv"), at * keys) for at, part in enumerate(("query", "key", "value"))}
    return {**stacked, **{part: one(name.format(part[0])) for part in ("z", "beta", "alpha")}}


_DENSE = [
    *decoder_fields(num_key_value_heads=4, head_dim=256, max_position_embeddings=32768),
    Field("linear_conv_kernel_dim", "linear_conv_kernel_dim", 4),
    Field("linear_key_head_dim", "linear_key_head_dim", 128),
    Field("linear_value_head_dim", "linear_value_head_dim", 128),
    Field("linear_num_key_heads", "linear_num_key_heads", 16),
    Field("linear_num_value_heads", "linear_num_value_heads", 32),
]
_SPARSE = [
    *without(_DENSE, "num_key_value_heads"),
    Field("num_key_value_heads", "num_query_groups", 2),
    *expert_fields(moe_intermediate_size=512, shared_expert_intermediate_size=512, router_aux_loss_coef=0.001),
]


def _kinds(hf: Config) -> dict[str, Any]:
    """``linear_attention_freq``: n if every n-th layer has full attention, otherwise a list."""
    must_be(hf, "attn_output_gate", True)
    types = kinds_of_layers(hf, every=hf.get("full_attention_interval", 4), kind=LINEAR)
    return {"linear_attention_freq": pattern_of(hf, types, LINEAR) or [1] * len(types)}


def _kinds_of(ours: Qwen35Config) -> dict[str, Any]:
    every = ours.linear_attention_freq
    interval = {"full_attention_interval": every} if isinstance(every, int) else {}
    return {**interval, "layer_types": [LINEAR if flag else FULL for flag in ours.layers_with_linear_attention]}


_KINDS = Translation(_kinds, _kinds_of)
_ONLY = {"hidden_act": "silu", "attention_bias": False}
_conversion = partial(decoder_conversion, model=Qwen3NextModel, partial=0.25)
QWEN3_NEXT = _conversion(
    "Qwen3NextForCausalLM",
    kind=Qwen3NextConfig,
    rows=lambda config: _table(config, _by_key_head),
    fields=[*_SPARSE, *expert_fields(num_experts=512, num_experts_per_tok=10)],
    only=_ONLY | {"model_type": "qwen3_next"},
    translations=[_KINDS, EXPERT_LAYERS, expert_weights(default=True)],
    ignored=("mtp.*",),
)

# transformers leaves out the same weights.
_of_vision = partial(
    _conversion,
    translations=[_KINDS],
    flat=text_config,
    **IN_VISION_MODEL | {"ignored": ("mtp.*", "model.visual.*")},
)
QWEN35 = _of_vision(
    "Qwen3_5ForCausalLM",
    kind=Qwen35Config,
    rows=lambda config: _table(config, _one_by_one),
    fields=_DENSE,
    only=_ONLY | {"model_type": "qwen3_5_text"},
    also=("Qwen3_5ForConditionalGeneration",),
)
_with_experts = partial(
    _of_vision,
    kind=Qwen35MoEConfig,
    fields=[*without(_SPARSE, "intermediate_size"), *expert_fields(num_experts=256, num_experts_per_tok=8)],
    only=_ONLY | {"model_type": "qwen3_5_moe_text"},
)
QWEN35_MOE = _with_experts("Qwen3_5MoeForCausalLM", rows=lambda config: _table(config, _one_by_one))
# The releases have one tensor for all experts. transformers writes text models with a tensor for each, and so do exports.
QWEN35_MOE_RELEASED = _with_experts(
    "Qwen3_5MoeForConditionalGeneration", rows=lambda config: _table(config, _one_by_one, stacked=True)
)
