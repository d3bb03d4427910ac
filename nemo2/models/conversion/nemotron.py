# SPDX-License-Identifier: Apache-2.0
"""Nemotron 3 and 4."""

from typing import Any

from nemo2.models.conversion.llama import attention, decoder
from nemo2.models.conversion.pieces import one
from nemo2.models.conversion.positions import rope_fields, rope_of
from nemo2.models.conversion.settings import Config, Field, decoder_fields, read, said, without, written
from nemo2.models.conversion.table import Conversion, Row, linear, norm
from nemo2.models.nemotron import NemotronConfig, NemotronModel

_FIELDS = [
    *without(decoder_fields(max_position_embeddings=4096, initializer_range=0.0134), "rms_norm_eps"),
    Field("norm_eps", "layernorm_epsilon", 1e-5),
]
_ONLY = {"model_type": "nemotron", "hidden_act": "relu2", "attention_bias": False, "mlp_bias": False}


def rows(config: NemotronConfig) -> list[Row]:
    layer = [
        *attention(config, norm_bias=True),
        *norm("mlp.linear_fc1.layer_norm_", one("post_attention_layernorm."), bias=True),
        *linear("mlp.linear_fc1.", one("mlp.up_proj.")),
        *linear("mlp.linear_fc2.", one("mlp.down_proj.")),
    ]
    return decoder(config, layer, norm_bias=True)


def config(hf: Config) -> NemotronConfig:
    rope = rope_of(hf, partial=hf.get("rope_percent", 0.5))
    return NemotronConfig(**read(hf, _FIELDS, only=_ONLY), rotary_base=rope.theta, rotary_percent=rope.partial)


def hf_config(ours: NemotronConfig) -> dict[str, Any]:
    hf = {
        **written(ours, _FIELDS, only=_ONLY),
        "num_key_value_heads": ours.num_query_groups or ours.num_attention_heads,
        **rope_fields(ours.rotary_base, partial=ours.rotary_percent),
    }
    return said(ours, hf, config)


NEMOTRON = Conversion(
    architectures=("NemotronForCausalLM",),
    model=NemotronModel,
    configs=(NemotronConfig,),
    rows=rows,
    config=config,
    hf_config=hf_config,
)
