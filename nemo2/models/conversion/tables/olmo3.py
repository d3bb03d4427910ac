# SPDX-License-Identifier: Apache-2.0
"""The conversion of OLMo 3."""

from typing import Any

from nemo2.models.conversion.decoder import decoder_conversion
from nemo2.models.conversion.positions import positions_of
from nemo2.models.conversion.settings import (
    DERIVED,
    FULL,
    SLIDING,
    Config,
    Translation,
    alternating_windows,
    decoder_fields,
    overlaid,
    refusal,
)
from nemo2.models.conversion.tables.olmo2 import rows
from nemo2.models.olmo3 import OLMo3Config, OLMo3Model


def _flat(hf: Config) -> Config:
    """In transformers 5 each kind of layer has its own rotary positions."""
    both = hf.get("rope_parameters") or {}
    if not {FULL, SLIDING} & both.keys():
        return hf
    near, far = ({"rope_theta": 500_000.0, **(both.get(kind) or {})} for kind in (SLIDING, FULL))
    if near.get("rope_type", "default") != "default" or near["rope_theta"] != far["rope_theta"]:
        reason = "nemo2's model has one rotary base, and stretches positions in layers without a window only"
        raise refusal(hf, "rope_parameters", reason)
    return overlaid(hf, rope_parameters=far)


def _positions_of(ours: OLMo3Config) -> dict[str, Any]:
    theta, far = float(ours.rotary_base), positions_of(ours)["rope_parameters"]
    return {"rope_parameters": {FULL: far, SLIDING: {"rope_type": "default", "rope_theta": theta}}}


OLMO3 = decoder_conversion(
    "Olmo3ForCausalLM",
    OLMo3Model,
    OLMo3Config,
    rows=rows,
    fields=decoder_fields(head_dim=DERIVED, rms_norm_eps=1e-5),
    only={"model_type": "olmo3", "hidden_act": "silu", "attention_bias": False},
    translations=[alternating_windows(every=4), Translation(theirs=_positions_of)],
    theta=500_000.0,
    flat=_flat,
)
