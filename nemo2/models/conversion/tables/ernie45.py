# SPDX-License-Identifier: Apache-2.0
"""The conversion of ERNIE 4.5, dense."""

from nemo2.models.conversion.decoder import decoder_conversion, rows
from nemo2.models.conversion.settings import Field, decoder_fields
from nemo2.models.ernie45 import ERNIE45Config, ERNIE45Model

ERNIE45 = decoder_conversion(
    "Ernie4_5ForCausalLM",
    ERNIE45Model,
    ERNIE45Config,
    rows=rows,
    fields=[
        *decoder_fields(
            num_key_value_heads=2,
            head_dim=128,
            rms_norm_eps=1e-5,
            max_position_embeddings=131072,
            tie_word_embeddings=True,
        ),
        Field("use_bias", "add_bias_linear", False),
    ],
    only={"model_type": "ernie4_5", "hidden_act": "silu"},
    theta=500_000.0,
)
