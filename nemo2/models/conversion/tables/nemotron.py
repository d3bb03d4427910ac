# SPDX-License-Identifier: Apache-2.0
"""The conversion of Nemotron 3 and 4."""

from typing import Any

from nemo2.models.conversion.decoder import attention, decoder, decoder_conversion, feed_forward
from nemo2.models.conversion.pieces import one
from nemo2.models.conversion.positions import rope_fields, rope_of
from nemo2.models.conversion.settings import Config, Field, decoder_fields, without
from nemo2.models.conversion.table import Row
from nemo2.models.nemotron import NemotronConfig, NemotronModel


def _rows(config: NemotronConfig) -> list[Row]:
    layer = [
        *attention(config, norm_bias=True),
        *feed_forward(one("mlp.up_proj."), "mlp.down_proj.", norm_bias=True),
    ]
    return decoder(config, layer, norm_bias=True)


def _rotated(hf: Config, settings: Config) -> dict[str, Any]:
    rope = rope_of(hf, partial=hf.get("rope_percent", 0.5))
    return {"rotary_base": rope.theta, "rotary_percent": rope.partial}


NEMOTRON = decoder_conversion(
    "NemotronForCausalLM",
    NemotronModel,
    NemotronConfig,
    rows=_rows,
    fields=[
        *without(decoder_fields(max_position_embeddings=4096, initializer_range=0.0134), "rms_norm_eps"),
        Field("norm_eps", "layernorm_epsilon", 1e-5),
    ],
    only={"model_type": "nemotron", "hidden_act": "relu2", "attention_bias": False, "mlp_bias": False},
    rotary=(_rotated, lambda own: rope_fields(own.rotary_base, partial=own.rotary_percent)),
)
