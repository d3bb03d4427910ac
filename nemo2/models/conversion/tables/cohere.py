# SPDX-License-Identifier: Apache-2.0
"""The conversion of Cohere's Command R and Aya."""

from nemo2.models.cohere import CohereConfig, CohereModel
from nemo2.models.conversion.decoder import attention, decoder, decoder_conversion, gated_feed_forward
from nemo2.models.conversion.settings import DERIVED, Field, decoder_fields, without
from nemo2.models.conversion.table import Row


def rows(config: CohereConfig) -> list[Row]:
    without_norm = (row for row in gated_feed_forward() if "layer_norm_" not in row.key)
    return decoder(config, [*attention(config), *without_norm])


FIELDS = [
    *without(decoder_fields(head_dim=DERIVED, max_position_embeddings=8192, tie_word_embeddings=True), "rms_norm_eps"),
    Field("layer_norm_eps", "layernorm_epsilon", 1e-5),
    Field("logit_scale", "logit_scale", 0.0625),
]
ONLY = {"hidden_act": "silu", "attention_bias": False}


COHERE = decoder_conversion(
    "CohereForCausalLM",
    CohereModel,
    CohereConfig,
    rows=rows,
    fields=FIELDS,
    only={"model_type": "cohere", "use_qk_norm": False, **ONLY},
    theta=500_000.0,
)
