# SPDX-License-Identifier: Apache-2.0
"""Mistral 7B, Mistral NeMo, Large, and the text model of Mistral Small 3.1 (``Mistral3``)."""

from typing import Any

from nemo2.models.conversion.llama import rows
from nemo2.models.conversion.positions import KINDS, positions, positions_of, rope_of
from nemo2.models.conversion.settings import (
    Config,
    decoder_fields,
    read,
    said,
    size_of,
    text_config,
    window_of,
    written,
)
from nemo2.models.conversion.table import Conversion
from nemo2.models.mistral import MistralConfig7B, MistralModel

_FIELDS = decoder_fields(num_key_value_heads=8, max_position_embeddings=131072)
_ONLY = {"model_type": "mistral", "hidden_act": "silu"}


def config(hf: Config) -> MistralConfig7B:
    told = text_config(hf)
    window = window_of(told.get("sliding_window", 4096))
    fields = read(told, _FIELDS, only=_ONLY)
    return MistralConfig7B(
        **fields,
        **positions(told, rope_of(told, kinds=KINDS), longest=fields["seq_length"]),
        window_size=window,
        cp_comm_type=None if window is None else "a2a",
    )


def hf_config(ours: MistralConfig7B) -> dict[str, Any]:
    window = {"sliding_window": size_of(ours.window_size)}
    return said(ours, {**written(ours, _FIELDS, only=_ONLY), **window, **positions_of(ours)}, config)


MISTRAL = Conversion(
    architectures=("MistralForCausalLM", "Mistral3ForConditionalGeneration"),
    model=MistralModel,
    configs=(MistralConfig7B,),
    rows=rows,
    config=config,
    hf_config=hf_config,
    ignored=("*vision_tower.*", "*multi_modal_projector.*"),
    prefixes=("", "language_model."),
    renamed=(("model.language_model.", "model."),),
)
