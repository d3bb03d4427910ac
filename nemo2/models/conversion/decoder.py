# SPDX-License-Identifier: Apache-2.0
"""What the conversions of decoders share: the rows under the names that most families have, and the conversion of a decoder
whose config.json has one field for each of nemo2's settings, rotary positions, and little else. A family names its fields, and
the rest as two functions."""

from collections.abc import Callable, Sequence
from typing import Any, Optional

from nemo2.models.conversion.pieces import Operation, cat, gated_qkv, one, qkv
from nemo2.models.conversion.positions import Rotary, any_scaling
from nemo2.models.conversion.settings import Config, Field, Translation, read, said, written
from nemo2.models.conversion.table import Conversion, Row, linear, norm, under
from nemo2.models.gpt import GPTConfig


def decoder_conversion(
    architecture: str,
    model: Any,
    kind: Any,
    *,
    rows: Callable[[Any], list[Row]],
    fields: Sequence[Field],
    only: Config,
    translations: Sequence[Translation] = (),
    theta: float = 10_000.0,
    partial: Optional[float] = None,
    rotary: Optional[Rotary] = None,
    also: Sequence[str] = (),
    flat: Callable[[Config], Config] = lambda hf: hf,
    configs: Sequence[type] = (),
    **more: Any,
) -> Conversion:
    """The conversion between ``kind``, a configuration of nemo2, and config.json.

    Args:
        fields, only: As in `read`.
        translations: The other settings.
        theta: The rotary base if config.json omits it.
        partial: The share of rotated channels if config.json omits it. None: all, and no other share is supported.
        rotary: Rotary positions, if the family has settings of its own for them. None: `any_scaling`.
        also: Other architectures of config.json with the same text model.
        flat: A config.json's text model, with rotary positions as most decoders have them. ``translations`` get it too.
        configs: The classes of nemo2's configurations, if ``kind`` is a function that chooses one by the settings.
        more: Other fields of `Conversion`.
    """
    positions, positions_of = rotary or any_scaling(theta=theta, partial=partial)

    def config(released: Config) -> Any:
        hf = flat(released)
        settings = read(hf, fields, only=only)
        settings |= positions(hf, settings)
        for translation in translations:
            settings |= translation.ours(hf)
        return kind(**settings)

    def hf_config(own: Any) -> dict[str, Any]:
        hf = written(own, fields, only=only) | positions_of(own)
        for translation in translations:
            hf |= translation.theirs(own)
        return said(own, hf, config)

    return Conversion(
        architectures=(architecture, *also),
        model=model,
        configs=tuple(configs) or (kind,),
        rows=rows,
        config=config,
        hf_config=hf_config,
        **more,
    )


def rows(config: GPTConfig) -> list[Row]:
    return decoder(config, [*attention(config), *gated_feed_forward(bias=config.add_bias_linear)])


def decoder(config: GPTConfig, layer: list[Row], *, norm_bias: bool = False) -> list[Row]:
    """A whole model with these layers, under names that most families share."""
    return [
        Row("embedding.word_embeddings.weight", one("model.embed_tokens.weight")),
        *under("decoder.layers.*.", "model.layers.*.", layer),
        *norm("decoder.final_layernorm.", one("model.norm."), bias=norm_bias),
        *output_layer(config, "lm_head.weight"),
    ]


def output_layer(config: GPTConfig, name: str) -> list[Row]:
    """The output layer's row. Empty if the output layer is tied to the embedding."""
    return [] if config.share_embeddings_and_output_weights else [Row("output_layer.weight", one(name))]


def attention(config: GPTConfig, projections: Optional[Operation] = None, *, norm_bias: bool = False) -> list[Row]:
    """A layer's norm and attention, under names that most families share. A ``projections`` of None: queries, keys and values
    are a tensor each."""
    together = gated_qkv if config.attention_output_gate else qkv
    projections = projections or together("self_attn.q_proj.", "self_attn.k_proj.", "self_attn.v_proj.")
    return [
        *norm("self_attention.linear_qkv.layer_norm_", one("input_layernorm."), bias=norm_bias),
        *linear("self_attention.linear_qkv.", projections, bias=config.add_bias_linear or config.add_qkv_bias),
        *linear("self_attention.linear_proj.", one("self_attn.o_proj."), bias=config.add_bias_linear),
        *(norm("self_attention.q_layernorm.", one("self_attn.q_norm.")) if config.qk_layernorm else []),
        *(norm("self_attention.k_layernorm.", one("self_attn.k_norm.")) if config.qk_layernorm else []),
    ]


def gated_feed_forward(*, bias: bool = False) -> list[Row]:
    """A layer's second norm and gated feed-forward, under names that most families share."""
    return feed_forward(cat("mlp.gate_proj.", "mlp.up_proj."), "mlp.down_proj.", bias=bias)


def feed_forward(
    first: Operation,
    second: str,
    *,
    bias: bool = False,
    norm_bias: bool = False,
    norm_name: str = "post_attention_layernorm.",
) -> list[Row]:
    """A layer's second norm and feed-forward, whose projections have these names."""
    return [
        *norm("mlp.linear_fc1.layer_norm_", one(norm_name), bias=norm_bias),
        *linear("mlp.linear_fc1.", first, bias=bias),
        *linear("mlp.linear_fc2.", one(second), bias=bias),
    ]


BIASES = Translation(
    lambda hf: {"add_bias_linear": bool(hf.get("attention_bias") or hf.get("mlp_bias"))},
    lambda own: dict.fromkeys(("attention_bias", "mlp_bias"), own.add_bias_linear),
)
"""``add_bias_linear`` for Hugging Face's two fields. In nemo2 all linear layers have biases or none (`unbiased`)."""


def unbiased(hf: Config) -> list[str]:
    """The names of biases that nemo2's layers have and the file lacks, if config.json sets only one of the two fields."""
    parts = {"attention_bias": "self_attn", "mlp_bias": "mlp"}
    return [f"model.layers.*.{part}.*.bias" for field, part in parts.items() if not hf.get(field)]
