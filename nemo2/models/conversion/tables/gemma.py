# SPDX-License-Identifier: Apache-2.0
"""The conversion of Gemma 1."""

from typing import Any

from nemo2.models.conversion.decoder import decoder_conversion, rows
from nemo2.models.conversion.settings import Config, Translation, decoder_fields, overlaid
from nemo2.models.gemma import GemmaConfig, GemmaModel

GEMMA_DEFAULTS: dict[str, Any] = {"head_dim": 256, "max_position_embeddings": 8192, "tie_word_embeddings": True}
"""Defaults of transformers' classes that all generations of Gemma share."""
TANH = "gelu_pytorch_tanh"


def _flat(hf: Config) -> Config:
    return overlaid(hf, hidden_act=hf.get("hidden_activation") or hf.get("hidden_act", TANH))


GEMMA = decoder_conversion(
    "GemmaForCausalLM",
    GemmaModel,
    GemmaConfig,
    rows=rows,
    fields=decoder_fields(num_key_value_heads=16, **GEMMA_DEFAULTS),
    only={"model_type": "gemma", "hidden_act": TANH, "attention_bias": False},
    translations=[Translation(theirs=lambda own: {"hidden_activation": TANH})],
    flat=_flat,
)
