# SPDX-License-Identifier: Apache-2.0
"""The conversions of Hunyuan, dense and with experts."""

from typing import Any

from nemo2.models.conversion.decoder import attention, decoder, decoder_conversion, gated_feed_forward
from nemo2.models.conversion.pieces import cat, one
from nemo2.models.conversion.positions import positions_of, rope_fields
from nemo2.models.conversion.settings import Config, Field, Translation, decoder_fields, overlaid, refusal
from nemo2.models.conversion.table import Row, linear, norm
from nemo2.models.hunyuan import HunyuanConfig, HunyuanModel
from nemo2.models.hunyuan_moe import HunyuanMoEConfig, HunyuanMoEModel
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


def _rows(config: HunyuanMoEConfig) -> list[Row]:
    layer = [
        *normed_attention(config),
        *norm("pre_mlp_layernorm.", one("post_attention_layernorm.")),
        Row("mlp.router.weight", one("mlp.gate.wg.weight")),
    ]
    for ours, theirs in (("mlp.experts.experts", "mlp.experts.*"), ("mlp.shared_experts", "mlp.shared_mlp")):
        layer += linear(f"{ours}.linear_fc1.", cat(f"{theirs}.gate_proj.", f"{theirs}.up_proj."))
        layer += linear(f"{ours}.linear_fc2.", one(f"{theirs}.down_proj."))
    return decoder(config, layer)


_OF_EACH_LAYER = {"num_experts": 1, "moe_topk": 1, "num_shared_expert": 1, "moe_intermediate_size": None}
"""Fields that a release may state as a list with an entry per layer, with their defaults."""


def _flat(hf: Config) -> Config:
    uniform = {}
    for name, default in _OF_EACH_LAYER.items():
        values = hf.get(name, default)
        values = set(values) if isinstance(values, list) else {values}
        if len(values) != 1:
            raise refusal(hf, name, "nemo2's model has the same in every layer")
        uniform[name] = values.pop()
    if uniform["num_shared_expert"] != 1:
        raise refusal(hf, "num_shared_expert", "nemo2's model has one shared expert in every layer")
    if uniform["moe_intermediate_size"] not in (None, hf.get("intermediate_size")):
        raise refusal(hf, "moe_intermediate_size", "transformers' class has experts of intermediate_size")
    return overlaid(flat(hf), **uniform)


def _widths(hf: Config) -> dict[str, Any]:
    width = hf["intermediate_size"]
    return {"moe_ffn_hidden_size": width, "moe_shared_expert_intermediate_size": width}


HUNYUAN_MOE = decoder_conversion(
    "HunYuanMoEV1ForCausalLM",
    HunyuanMoEModel,
    HunyuanMoEConfig,
    rows=_rows,
    fields=[
        *decoder_fields(rms_norm_eps=1e-5),
        Field("num_experts", "num_moe_experts", 1),
        Field("moe_topk", "moe_router_topk", 1),
    ],
    only={"model_type": "hunyuan_v1_moe", "hidden_act": "silu", "attention_bias": False},
    translations=[RAISED_BASE, Translation(_widths)],
    flat=_flat,
)
