# SPDX-License-Identifier: Apache-2.0
"""The conversion of Command R7B and Command A."""

from typing import Any

from nemo2.models.cohere2 import Cohere2Config, Cohere2Model
from nemo2.models.conversion.decoder import decoder_conversion
from nemo2.models.conversion.settings import (
    FULL,
    Config,
    Translation,
    alternating_windows,
    kinds_of_layers,
)
from nemo2.models.conversion.tables.cohere import FIELDS, ONLY, rows


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
