# SPDX-License-Identifier: Apache-2.0
"""The conversion of Ministral 3, the text model."""

from typing import Any

from nemo2.models.conversion.decoder import decoder_conversion, rows
from nemo2.models.conversion.positions import positions_of
from nemo2.models.conversion.settings import Config, Field, Translation, decoder_fields, overlaid, refusal, text_config
from nemo2.models.conversion.table import IN_VISION_MODEL
from nemo2.models.ministral3 import Ministral3Config, Ministral3Model

_ROPE = {"type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "original_max_position_embeddings": 16384}
_ROPE |= {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
_GROWTH = "llama_4_scaling_beta"


def _flat(released: Config) -> Config:
    hf = text_config(released)
    rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or _ROPE)
    rope.pop("max_position_embeddings", None)  # repeats the field outside
    growth = rope.pop(_GROWTH, None)
    if rope.get("rope_type", rope.get("type")) != "yarn" or growth is None:
        raise refusal(hf, "rope_parameters", f"nemo2's model supports only the kind 'yarn' with {_GROWTH}")
    return overlaid(hf, **{"rope_parameters": rope, "rope_scaling": None, _GROWTH: growth})


def _theirs(ours: Ministral3Config) -> dict[str, Any]:
    fields = positions_of(ours)
    return {
        name: {**fields[name], _GROWTH: ours.query_growth}
        for name in ("rope_parameters", "rope_scaling") & fields.keys()
    }


MINISTRAL3 = decoder_conversion(
    "Ministral3ForCausalLM",
    Ministral3Model,
    Ministral3Config,
    rows=rows,
    fields=[
        *decoder_fields(num_key_value_heads=8, head_dim=128, max_position_embeddings=262144, rms_norm_eps=1e-5),
        Field(_GROWTH, "query_growth"),
    ],
    only={"model_type": "ministral3", "hidden_act": "silu", "sliding_window": None},
    translations=[Translation(theirs=_theirs)],
    flat=_flat,
    also=("Mistral3ForConditionalGeneration",),
    text_types=("ministral3",),
    **IN_VISION_MODEL,
)
