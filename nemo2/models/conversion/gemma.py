# SPDX-License-Identifier: Apache-2.0
"""Gemma 1, 2 and the text model of Gemma 3."""

from collections.abc import Sequence
from typing import Any

from nemo2.models.conversion.llama import attention, decoder, rows
from nemo2.models.conversion.pieces import cat, one
from nemo2.models.conversion.positions import Rope, rope_fields, rope_of, scaled
from nemo2.models.conversion.settings import (
    FULL,
    SLIDING,
    Config,
    Field,
    decoder_fields,
    layer_types,
    pattern_of,
    read,
    refusal,
    said,
    size_of,
    text_config,
    window_of,
    written,
)
from nemo2.models.conversion.table import Conversion, Row, linear, norm
from nemo2.models.gemma import GemmaConfig, GemmaModel
from nemo2.models.gemma2 import Gemma2Config, Gemma2Model
from nemo2.models.gemma3 import Gemma3Config, Gemma3Model

_SHARED: dict[str, Any] = {"head_dim": 256, "max_position_embeddings": 8192, "tie_word_embeddings": True}
_FIELDS_1 = decoder_fields(num_key_value_heads=16, **_SHARED)
_FIELDS_2 = [
    *decoder_fields(num_key_value_heads=4, **_SHARED),
    Field("query_pre_attn_scalar", "query_pre_attn_scalar", 256),
    Field("attn_logit_softcapping", "attn_logit_softcapping", 50.0),
    Field("final_logit_softcapping", "final_logit_softcapping", 30.0),
]
# The released config.json of vision models omits the defaults of the class.
_DEFAULTS_3 = {"vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26}
_FIELDS_3 = [
    *decoder_fields(
        num_key_value_heads=4, num_attention_heads=8, **_DEFAULTS_3, **_SHARED | {"max_position_embeddings": 131072}
    ),
    Field("final_logit_softcapping", "final_logit_softcapping", None),
]
_TANH = "gelu_pytorch_tanh"
_ONLY_1 = {"model_type": "gemma", "hidden_act": _TANH, "attention_bias": False}
_ONLY = {"hidden_activation": _TANH, "attention_bias": False}
# transformers' class has attn_logit_softcapping and ignores it, because Gemma 3 has norms of heads instead.
_ONLY_3 = _ONLY | {"model_type": "gemma3_text", "use_bidirectional_attention": False, "attn_logit_softcapping": None}


def rows_with_norms_behind(config: Gemma2Config | Gemma3Config) -> list[Row]:
    layer = [
        *attention(config),
        *norm("self_attention.linear_proj.post_layernorm.", one("post_attention_layernorm.")),
        *norm("mlp.linear_fc1.layer_norm_", one("pre_feedforward_layernorm.")),
        *linear("mlp.linear_fc1.", cat("mlp.gate_proj.", "mlp.up_proj.")),
        *linear("mlp.linear_fc2.", one("mlp.down_proj.")),
        *norm("mlp.linear_fc2.post_layernorm.", one("post_feedforward_layernorm.")),
    ]
    return decoder(config, layer)


def config_1(hf: Config) -> GemmaConfig:
    hf = {**hf, "hidden_act": hf.get("hidden_activation") or hf.get("hidden_act", _TANH)}
    return GemmaConfig(**read(hf, _FIELDS_1, only=_ONLY_1), rotary_base=rope_of(hf).theta)


def hf_config_1(ours: GemmaConfig) -> dict[str, Any]:
    hf = {**written(ours, _FIELDS_1, only=_ONLY_1), "hidden_activation": _TANH, **rope_fields(ours.rotary_base)}
    return said(ours, hf, config_1)


def config_2(hf: Config) -> Gemma2Config:
    types = hf.get("layer_types") or [FULL if layer % 2 else SLIDING for layer in range(hf["num_hidden_layers"])]
    return Gemma2Config(
        **read(hf, _FIELDS_2, only=_ONLY | {"model_type": "gemma2"}),
        rotary_base=rope_of(hf).theta,
        window_size=window_of(hf.get("sliding_window", 4096)),
        window_attn_skip_freq=pattern_of(hf, types),
    )


def hf_config_2(ours: Gemma2Config) -> dict[str, Any]:
    hf = {
        **written(ours, _FIELDS_2, only=_ONLY | {"model_type": "gemma2"}),
        "sliding_window": size_of(ours.window_size),
        "layer_types": layer_types(ours),
        **rope_fields(ours.rotary_base),
    }
    return said(ours, hf, config_2)


def config_3(hf: Config) -> Gemma3Config:
    """nemo2's configuration. In a vision model's config.json the text model has a separate configuration."""
    told = text_config(hf)
    fields = read(told, _FIELDS_3, only=_ONLY_3)
    near, far = _rotary(told)
    scalar, period = told.get("query_pre_attn_scalar", 256), told.get("sliding_window_pattern", 6)
    types = told.get("layer_types") or [SLIDING if (n + 1) % period else FULL for n in range(fields["num_layers"])]
    return Gemma3Config(
        **fields,
        is_vision_language=told is not hf,
        softmax_scale=None if scalar == fields["kv_channels"] else scalar**-0.5,
        rotary_base=(int(near.theta), int(far.theta)),
        rope_scaling_factor=far.scaling.get("factor", 1.0),
        window_size=told.get("sliding_window", 4096),
        interleaved_attn_pattern=_interleaved(told, types),
    )


def hf_config_3(ours: Any) -> dict[str, Any]:
    bases = ours.rotary_base
    near, far = bases if isinstance(bases, (tuple, list)) else (bases, bases)
    scaling = {"rope_type": "linear", "factor": ours.rope_scaling_factor}
    scaling = scaling if ours.rope_scaling_factor != 1.0 else {"rope_type": "default"}
    scalar = ours.kv_channels if ours.softmax_scale is None else ours.softmax_scale**-2
    hf = {
        **written(ours, _FIELDS_3, only=_ONLY_3),
        "query_pre_attn_scalar": round(scalar),
        "sliding_window": size_of(ours.window_size),
        "layer_types": layer_types(ours),
        "sliding_window_pattern": sum(ours.interleaved_attn_pattern),
        "rope_theta": float(far),
        "rope_local_base_freq": float(near),
        "rope_scaling": scaling if ours.rope_scaling_factor != 1.0 else None,
        "rope_parameters": {
            FULL: {"rope_theta": float(far), **scaling},
            SLIDING: {"rope_theta": float(near), "rope_type": "default"},
        },
    }
    return said(ours, hf, config_3)


def _rotary(hf: Config) -> tuple[Rope, Rope]:
    """The rotary settings of local and of global layers."""
    both = hf.get("rope_parameters") or {}
    if FULL in both:
        near = rope_of({"rope_parameters": both.get(SLIDING)}, theta=10_000.0)
        far = rope_of({"rope_parameters": both[FULL]}, theta=1_000_000.0, kinds=("default", "linear"))
    else:
        near = rope_of({"rope_theta": hf.get("rope_local_base_freq", 10_000.0)})
        far = rope_of(hf, theta=1_000_000.0, kinds=("default", "linear"))
    if far.kind == "linear":
        scaled(hf, far, {"factor": ("rope_scaling_factor", 1.0)})
    return near, far


def _interleaved(hf: Config, types: Sequence[str]) -> tuple[int, int]:
    """The numbers of local and of global layers in the repeating pattern."""
    period = types.index(FULL) if FULL in types else len(types)
    behind = next((n for n, kind in enumerate(types[period:]) if kind != FULL), len(types) - period)
    pattern = [SLIDING] * period + [FULL] * behind
    if list(types) != (pattern * len(types))[: len(types)]:
        raise refusal(
            hf, "layer_types", "nemo2's Gemma 3 repeats one pattern of local layers followed by global layers"
        )
    told = hf.get("sliding_window_pattern")
    if told and not hf.get("layer_types"):
        return told - 1, 1
    return period, behind


GEMMA = Conversion(
    architectures=("GemmaForCausalLM",),
    model=GemmaModel,
    configs=(GemmaConfig,),
    rows=rows,
    config=config_1,
    hf_config=hf_config_1,
)

GEMMA2 = Conversion(
    architectures=("Gemma2ForCausalLM",),
    model=Gemma2Model,
    configs=(Gemma2Config,),
    rows=rows_with_norms_behind,
    config=config_2,
    hf_config=hf_config_2,
)

GEMMA3 = Conversion(
    architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    model=Gemma3Model,
    configs=(Gemma3Config,),
    rows=rows_with_norms_behind,
    config=config_3,
    hf_config=hf_config_3,
    ignored=("*vision_tower.*", "*multi_modal_projector.*"),
    prefixes=("", "language_model."),
    renamed=(("model.language_model.", "model."),),
)
