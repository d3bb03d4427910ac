# SPDX-License-Identifier: Apache-2.0
"""The conversion of StarCoder 2."""

from typing import Any

from nemo2.models.conversion.decoder import attention, decoder, decoder_conversion, feed_forward
from nemo2.models.conversion.pieces import one
from nemo2.models.conversion.positions import rope_fields, rope_of
from nemo2.models.conversion.settings import (
    DERIVED,
    Config,
    Field,
    Translation,
    decoder_fields,
    refusal,
    uniform_window,
    without,
)
from nemo2.models.conversion.table import Row
from nemo2.models.starcoder2 import Starcoder2Config, Starcoder2Model


def _rows(config: Starcoder2Config) -> list[Row]:
    layer = [
        *attention(config, norm_bias=True),
        *feed_forward(one("mlp.c_fc."), "mlp.c_proj.", bias=True, norm_bias=True),
    ]
    return decoder(config, layer, norm_bias=True)


def _check_dropout(hf: Config) -> dict[str, Any]:
    dropout = hf.get("residual_dropout", 0.0)
    if hf.get("embedding_dropout", 0.0) != dropout:
        raise refusal(hf, "embedding_dropout", f"nemo2's model needs residual_dropout's value, {dropout}")
    return {}


STARCODER2 = decoder_conversion(
    "Starcoder2ForCausalLM",
    Starcoder2Model,
    Starcoder2Config,
    rows=_rows,
    fields=[
        *without(
            decoder_fields(
                head_dim=DERIVED,
                num_key_value_heads=2,
                max_position_embeddings=4096,
                initializer_range=0.018042,
                tie_word_embeddings=True,
            ),
            "rms_norm_eps",
        ),
        Field("norm_epsilon", "layernorm_epsilon", 1e-5),
        Field("residual_dropout", "hidden_dropout", 0.0),
    ],
    only={"model_type": "starcoder2", "hidden_act": "gelu_pytorch_tanh", "use_bias": True},
    translations=[
        uniform_window(),
        Translation(_check_dropout, lambda own: {"embedding_dropout": own.hidden_dropout}),
    ],
    rotary=(lambda hf, _: {"rotary_base": rope_of(hf).theta}, lambda ours: rope_fields(ours.rotary_base)),
)
