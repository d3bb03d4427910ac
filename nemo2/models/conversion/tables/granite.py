# SPDX-License-Identifier: Apache-2.0
"""The conversion of Granite 3, dense."""

from nemo2.models.conversion.decoder import BIASES, decoder_conversion, rows, unbiased
from nemo2.models.conversion.settings import DERIVED, Field, decoder_fields
from nemo2.models.granite import GraniteConfig, GraniteModel

FIELDS = [
    *decoder_fields(head_dim=DERIVED),
    Field("embedding_multiplier", "embedding_multiplier", 1.0),
    Field("residual_multiplier", "residual_multiplier", 1.0),
    Field("attention_multiplier", "softmax_scale", 1.0),
    Field("logits_scaling", "logits_scaling", 1.0),
]

GRANITE = decoder_conversion(
    "GraniteForCausalLM",
    GraniteModel,
    GraniteConfig,
    rows=rows,
    fields=FIELDS,
    only={"model_type": "granite", "hidden_act": "silu"},
    translations=[BIASES],
    unbiased=unbiased,
)
