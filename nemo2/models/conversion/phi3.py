# SPDX-License-Identifier: Apache-2.0
"""Phi-3 mini and medium, their short versions: long ones stretch positions by a factor per channel, which ours don't."""

from typing import Any

from nemo2.models.conversion.llama import decoder
from nemo2.models.conversion.pieces import fused_qkv, one
from nemo2.models.conversion.settings import (
    Config,
    Field,
    decoder_fields,
    read,
    rope_fields,
    rope_of,
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
    rope = rope_of(hf)
    # transformers 5 writes the length before stretching also where nothing is stretched.
    window = window_of(hf.get("sliding_window"))
    return Phi3Config(
        **read(hf, _FIELDS, only=_ONLY),
        rotary_base=rope.theta,
        rotary_percent=rope.partial,
        window_size=window,
        cp_comm_type=None if window is None else "a2a",
    )


def hf_config(ours: Phi3Config) -> dict[str, Any]:
    hf = {
        **written(ours, _FIELDS, only=_ONLY),
        "original_max_position_embeddings": ours.seq_length,
        "sliding_window": size_of(ours.window_size),
        **rope_fields(ours.rotary_base, partial=ours.rotary_percent),
    }
    return said(ours, hf, config)


PHI3 = Conversion(
    architectures=("Phi3ForCausalLM",),
    model=Phi3Model,
    configs=(Phi3Config,),
    rows=rows,
    config=config,
    hf_config=hf_config,
)
