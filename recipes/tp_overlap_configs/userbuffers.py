# SPDX-License-Identifier: Apache-2.0
"""The userbuffer presets by name: ``from ...userbuffers import userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192``.

Each import makes a new object. `nemo2.mcore.overlap.presets` describes the presets and the automatic choice.
"""

from typing import Any

from nemo2.base.names import did_you_mean
from nemo2.mcore.overlap.presets import PRESETS
from nemo2.mcore.overlap.tp_overlap_cfg import (
    BulkOverlapCfg,
    PipelineOverlapCfg,
    RingExchangeOverlapCfg,
    TPOverlapCfg,
    TransformerLayerTPOverlapCfg,
)

__all__ = [
    "BulkOverlapCfg",
    "PipelineOverlapCfg",
    "RingExchangeOverlapCfg",
    "TPOverlapCfg",
    "TransformerLayerTPOverlapCfg",
]


def __getattr__(name: str) -> Any:
    if name not in PRESETS:
        raise AttributeError(f"{__name__} has no name {name!r}{did_you_mean(name, list(PRESETS))}")
    return PRESETS[name].settings()


def __dir__() -> list[str]:
    return [*__all__, *PRESETS]
