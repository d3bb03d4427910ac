# SPDX-License-Identifier: Apache-2.0
"""The conversion of Mistral 7B, Mistral NeMo 12B and Mistral Large 123B."""

from nemo2.models.conversion.decoder import decoder_conversion, rows
from nemo2.models.conversion.settings import decoder_fields, text_config, uniform_window
from nemo2.models.conversion.table import IN_VISION_MODEL
from nemo2.models.mistral import MistralConfig7B, MistralModel

MISTRAL = decoder_conversion(
    "MistralForCausalLM",
    MistralModel,
    MistralConfig7B,
    rows=rows,
    fields=decoder_fields(num_key_value_heads=8, max_position_embeddings=131072),
    only={"model_type": "mistral", "hidden_act": "silu"},
    translations=[uniform_window(4096)],
    flat=text_config,
    also=("Mistral3ForConditionalGeneration",),
    **IN_VISION_MODEL,
)
