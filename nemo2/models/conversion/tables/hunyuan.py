# SPDX-License-Identifier: Apache-2.0
"""The conversion of Hunyuan, dense."""

from typing import Any

from nemo2.models.conversion.decoder import attention, decoder, decoder_conversion, gated_feed_forward
from nemo2.models.conversion.pieces import one
from nemo2.models.conversion.positions import positions_of, rope_fields
from nemo2.models.conversion.settings import Config, Translation, decoder_fields, overlaid
from nemo2.models.conversion.table import Row, norm
from nemo2.models.hunyuan import HunyuanConfig, HunyuanModel
from nemo2.models.rotary import RaisedBase


def rows(config: HunyuanConfig) -> list[Row]:
    return decoder(config, [*normed_attention(config), *gated_feed_forward()])


def normed_attention(config: HunyuanConfig) -> list[Row]:
    return [
        *(row for row in attention(config) if "_layernorm." not in row.key),
        *norm("self_attention.q_layernorm.", one("self_attn.query_layernorm.")),
        *norm("self_attention.k_layernorm.", one("self_attn.key_layernorm.")),
    ]


def flat(hf: Config) -> Config:
    """The release calls the raised base "dynamic". Its file has other numbers beside ``alpha``, which have no effect."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type")) != "dynamic" or not rope.get("alpha"):
        return hf
    plain = {"rope_theta": rope.get("rope_theta", hf.get("rope_theta", 10_000.0))}
    return overlaid(hf, rope_parameters=plain, rope_scaling=None, alpha=rope["alpha"])


def _raised_base(hf: Config) -> dict[str, Any]:
    """nemo2's setting for ``alpha`` of `flat`."""
    if not hf.get("alpha"):
        return {}
    longest = hf.get("max_position_embeddings", 2048)
    return {"rope_stretching": RaisedBase(original_length=longest, factor=hf["alpha"])}


def _raised_base_of(ours: HunyuanConfig) -> dict[str, Any]:
    """The inverse of `flat` and `_raised_base`."""
    stretching = ours.rope_stretching
    if not isinstance(stretching, RaisedBase):
        return positions_of(ours)
    longest = {"max_position_embeddings": stretching.original_length}
    return longest | rope_fields(ours.rotary_base, kind="dynamic", factor=1.0, alpha=float(stretching.factor))


RAISED_BASE = Translation(_raised_base, _raised_base_of)
HUNYUAN = decoder_conversion(
    "HunYuanDenseV1ForCausalLM",
    HunyuanModel,
    HunyuanConfig,
    rows=rows,
    fields=decoder_fields(rms_norm_eps=1e-5),
    only={"model_type": "hunyuan_v1_dense", "hidden_act": "silu", "attention_bias": False},
    translations=[RAISED_BASE],
    flat=flat,
)
