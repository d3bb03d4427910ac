# SPDX-License-Identifier: Apache-2.0
"""The conversions of Cohere's Command R, Aya, Command R7B and Command A."""

from typing import Any

from nemo2.models.cohere import CohereConfig, CohereModel
from nemo2.models.cohere2 import Cohere2Config, Cohere2Model
from nemo2.models.conversion.decoder import attention, decoder, decoder_conversion, gated_feed_forward
from nemo2.models.conversion.settings import (
    DERIVED,
    FULL,
    Config,
    Field,
    Translation,
    alternating_windows,
    decoder_fields,
    kinds_of_layers,
    without,
)
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


def _windows(hf: Config) -> dict[str, Any]:
    every = hf.get("sliding_window_pattern", 4)
    unrotated = [int(kind == FULL) for kind in kinds_of_layers(hf, every=every)]
    return {**alternating_windows(every=every).ours(hf), "no_rope_freq": unrotated}


COHERE2 = decoder_conversion(
    "Cohere2ForCausalLM",
    Cohere2Model,
    Cohere2Config,
    rows=rows,
    fields=FIELDS,
    only={"model_type": "cohere2", **ONLY},
    translations=[Translation(_windows, alternating_windows(every=4).theirs)],
    theta=500_000.0,
)
