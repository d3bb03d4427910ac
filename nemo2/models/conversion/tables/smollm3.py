# SPDX-License-Identifier: Apache-2.0
"""The conversion of SmolLM 3."""

from typing import Any

from nemo2.models.conversion.decoder import decoder_conversion, rows
from nemo2.models.conversion.settings import DERIVED, Config, Translation, decoder_fields, rotated_layers
from nemo2.models.smollm3 import SmolLM3Config, SmolLM3Model


def _rotated(hf: Config) -> dict[str, Any]:
    every = hf.get("no_rope_layer_interval", 4)
    rotated = hf.get("no_rope_layers") or [(layer + 1) % every for layer in range(hf["num_hidden_layers"])]
    return {"no_rope_freq": [int(not flag) for flag in rotated]}


SMOLLM3 = decoder_conversion(
    "SmolLM3ForCausalLM",
    SmolLM3Model,
    SmolLM3Config,
    rows=rows,
    fields=decoder_fields(
        head_dim=DERIVED, num_key_value_heads=4, max_position_embeddings=32768, tie_word_embeddings=True
    ),
    only={"model_type": "smollm3", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    | {"use_sliding_window": False},
    translations=[Translation(_rotated, lambda own: {"no_rope_layers": rotated_layers(own)})],
    theta=2_000_000.0,
)
