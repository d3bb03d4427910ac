# SPDX-License-Identifier: Apache-2.0
"""The conversions of Gemma 1, 2 and of the text model of Gemma 3."""

from collections.abc import Sequence
from typing import Any

from nemo2.models.conversion.decoder import attention, decoder, decoder_conversion, feed_forward, rows
from nemo2.models.conversion.pieces import cat, one
from nemo2.models.conversion.positions import rope_of, scaled
from nemo2.models.conversion.settings import (
    FULL,
    SLIDING,
    Config,
    Field,
    Translation,
    alternating_windows,
    decoder_fields,
    layer_types,
    overlaid,
    read,
    refusal,
    said,
    size_of,
    text_config,
    written,
)
from nemo2.models.conversion.table import IN_VISION_MODEL, Conversion, Row, norm
from nemo2.models.gemma import GemmaConfig, GemmaModel
from nemo2.models.gemma2 import Gemma2Config, Gemma2Model
from nemo2.models.gemma3 import Gemma3Config, Gemma3Model

GEMMA_DEFAULTS: dict[str, Any] = {"head_dim": 256, "max_position_embeddings": 8192, "tie_word_embeddings": True}
"""Defaults of transformers' classes that all generations of Gemma share."""
TANH = "gelu_pytorch_tanh"


GEMMA = decoder_conversion(
    "GemmaForCausalLM",
    GemmaModel,
    GemmaConfig,
    rows=rows,
    fields=decoder_fields(num_key_value_heads=16, **GEMMA_DEFAULTS),
    only={"model_type": "gemma", "hidden_act": TANH, "attention_bias": False},
    translations=[Translation(theirs=lambda own: {"hidden_activation": TANH})],
    flat=lambda hf: overlaid(hf, hidden_act=hf.get("hidden_activation") or hf.get("hidden_act", TANH)),
)


def rows_with_norms_behind(config: GemmaConfig) -> list[Row]:
    gate_and_up = cat("mlp.gate_proj.", "mlp.up_proj.")
    layer = [
        *attention(config),
        *norm("self_attention.linear_proj.post_layernorm.", one("post_attention_layernorm.")),
        *feed_forward(gate_and_up, "mlp.down_proj.", norm_name="pre_feedforward_layernorm."),
        *norm("mlp.linear_fc2.post_layernorm.", one("post_feedforward_layernorm.")),
    ]
    return decoder(config, layer)


GEMMA2 = decoder_conversion(
    "Gemma2ForCausalLM",
    Gemma2Model,
    Gemma2Config,
    rows=rows_with_norms_behind,
    fields=[
        *decoder_fields(num_key_value_heads=4, **GEMMA_DEFAULTS),
        Field("query_pre_attn_scalar", "query_pre_attn_scalar", 256),
        Field("attn_logit_softcapping", "attn_logit_softcapping", 50.0),
        Field("final_logit_softcapping", "final_logit_softcapping", 30.0),
    ],
    only={"model_type": "gemma2", "hidden_activation": TANH, "attention_bias": False},
    translations=[alternating_windows(every=2)],
)


# The released config.json of vision models omits the defaults of the class.
_DEFAULTS = {"vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26}
_FIELDS = [
    *decoder_fields(
        num_key_value_heads=4,
        num_attention_heads=8,
        **_DEFAULTS,
        **GEMMA_DEFAULTS | {"max_position_embeddings": 131072},
    ),
    Field("final_logit_softcapping", "final_logit_softcapping", None),
]
# transformers' class has attn_logit_softcapping and ignores it, because Gemma 3 has norms of heads instead.
_ONLY = {"model_type": "gemma3_text", "hidden_activation": TANH, "attention_bias": False}
_ONLY |= {"use_bidirectional_attention": False, "attn_logit_softcapping": None}


def _config(hf: Config) -> Gemma3Config:
    """nemo2's configuration. In a vision model's config.json the text model has a separate configuration."""
    text = text_config(hf)
    fields = read(text, _FIELDS, only=_ONLY)
    # The rotary settings of local and of global layers.
    both = text.get("rope_parameters") or {}
    if FULL in both:
        near = rope_of({"rope_parameters": both.get(SLIDING)}, theta=10_000.0)
        far = rope_of({"rope_parameters": both[FULL]}, theta=1_000_000.0, kinds=("default", "linear"))
    else:
        near = rope_of({"rope_theta": text.get("rope_local_base_freq", 10_000.0)})
        far = rope_of(text, theta=1_000_000.0, kinds=("default", "linear"))
    if far.kind == "linear":
        scaled(text, far, {"factor": ("rope_scaling_factor", 1.0)})
    scalar, period = text.get("query_pre_attn_scalar", 256), text.get("sliding_window_pattern", 6)
    types = text.get("layer_types") or [SLIDING if (n + 1) % period else FULL for n in range(fields["num_layers"])]
    return Gemma3Config(
        **fields,
        is_vision_language=text is not hf,
        softmax_scale=None if scalar == fields["kv_channels"] else scalar**-0.5,
        rotary_base=(int(near.theta), int(far.theta)),
        rope_scaling_factor=far.scaling.get("factor", 1.0),
        window_size=text.get("sliding_window", 4096),
        interleaved_attn_pattern=_interleaved(text, types),
    )


def _hf_config(ours: Any) -> dict[str, Any]:
    near, far = ours.rotary_bases
    scaling = {"rope_type": "linear", "factor": ours.rope_scaling_factor}
    scaling = scaling if ours.rope_scaling_factor != 1.0 else {"rope_type": "default"}
    scalar = ours.kv_channels if ours.softmax_scale is None else ours.softmax_scale**-2
    hf = {
        **written(ours, _FIELDS, only=_ONLY),
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
    return said(ours, hf, _config)


def _interleaved(hf: Config, types: Sequence[str]) -> tuple[int, int]:
    """The numbers of local and of global layers in the repeating pattern."""
    period = types.index(FULL) if FULL in types else len(types)
    behind = next((n for n, kind in enumerate(types[period:]) if kind != FULL), len(types) - period)
    pattern = [SLIDING] * period + [FULL] * behind
    if list(types) != (pattern * len(types))[: len(types)]:
        raise refusal(
            hf, "layer_types", "nemo2's Gemma 3 repeats one pattern of local layers followed by global layers"
        )
    length = hf.get("sliding_window_pattern")
    if length and not hf.get("layer_types"):
        return length - 1, 1
    return period, behind


GEMMA3 = Conversion(
    architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    model=Gemma3Model,
    configs=(Gemma3Config,),
    rows=rows_with_norms_behind,
    config=_config,
    hf_config=_hf_config,
    **IN_VISION_MODEL,
)
