# SPDX-License-Identifier: Apache-2.0
"""Phi-3 mini and medium, and Phi-4 mini. Their long versions stretch positions by a factor per channel."""

from typing import Any

from nemo2.models.conversion.llama import decoder
from nemo2.models.conversion.pieces import fused_qkv, one
from nemo2.models.conversion.positions import partial_positions, positions_of, rope_of
from nemo2.models.conversion.settings import (
    Config,
    Field,
    decoder_fields,
    read,
    said,
    size_of,
    window_of,
    without,
    written,
)
from nemo2.models.conversion.table import Conversion, Row, linear, norm
from nemo2.models.phi3 import Phi3Config, Phi3Model

_FIELDS = [
    *without(decoder_fields(max_position_embeddings=4096, rms_norm_eps=1e-5), "head_dim"),
    Field("resid_pdrop", "hidden_dropout", 0.0),
]
_LENGTH = "original_max_position_embeddings"
_ONLY = {"model_type": "phi3", "hidden_act": "silu", "embd_pdrop": 0.0}


def rows(config: Phi3Config) -> list[Row]:
    layer = [
        *norm("self_attention.linear_qkv.layer_norm_", one("input_layernorm.")),
        *linear("self_attention.linear_qkv.", fused_qkv("self_attn.qkv_proj.")),
        *linear("self_attention.linear_proj.", one("self_attn.o_proj.")),
        *norm("mlp.linear_fc1.layer_norm_", one("post_attention_layernorm.")),
        *linear("mlp.linear_fc1.", one("mlp.gate_up_proj.")),
        *linear("mlp.linear_fc2.", one("mlp.down_proj.")),
    ]
    return decoder(config, layer)


def config(hf: Config) -> Phi3Config:
    fields = read(hf, _FIELDS, only=_ONLY)
    told = {**hf, _LENGTH: hf.get(_LENGTH, 4096)}
    for name in ("rope_scaling", "rope_parameters"):  # the first releases have other names for longrope
        if (hf.get(name) or {}).get("type", (hf.get(name) or {}).get("rope_type")) in ("su", "yarn"):
            told[name] = {**hf[name], "rope_type": "longrope"}
    rope = rope_of(told, kinds=("default", "longrope"))
    window = window_of(hf.get("sliding_window"))
    return Phi3Config(
        **fields,
        **partial_positions(told, rope, longest=fields["seq_length"]),
        rotary_percent=rope.partial,
        window_size=window,
        cp_comm_type=None if window is None else "a2a",
    )


def hf_config(ours: Phi3Config) -> dict[str, Any]:
    hf = {
        **written(ours, _FIELDS, only=_ONLY),
        _LENGTH: ours.rope_stretching.original_length if ours.rope_stretching else ours.seq_length,
        "sliding_window": size_of(ours.window_size),
        **positions_of(ours, partial=ours.rotary_percent),
    }
    return said(ours, _as_released(hf), config)


def _as_released(hf: dict[str, Any]) -> dict[str, Any]:
    """``hf`` with only the released models' fields of the scaling, because transformers 4 rejects other fields. If the factor
    isn't the ratio of both lengths, ``hf`` is unchanged."""
    told = hf.get("rope_scaling")
    if told is None or "attention_factor" in told or told["factor"] != hf["max_position_embeddings"] / hf[_LENGTH]:
        return hf
    kept = {name: told[name] for name in ("rope_type", "short_factor", "long_factor")}
    return {**hf, "rope_scaling": {"type": kept.pop("rope_type"), **kept}}


PHI3 = Conversion(
    architectures=("Phi3ForCausalLM",),
    model=Phi3Model,
    configs=(Phi3Config,),
    rows=rows,
    config=config,
    hf_config=hf_config,
)
