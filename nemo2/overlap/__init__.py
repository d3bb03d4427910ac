# SPDX-License-Identifier: Apache-2.0
"""Which communication overlaps with computation, and the buffers it uses."""

from typing import TYPE_CHECKING

from nemo2.lazy import lazy_names

if TYPE_CHECKING:
    from nemo2.overlap.presets import preset as preset
    from nemo2.overlap.presets import preset_names as preset_names
    from nemo2.overlap.rules import decide as decide
    from nemo2.overlap.settings import OverlapFacts as OverlapFacts
    from nemo2.overlap.tp_overlap_cfg import BulkOverlapCfg as BulkOverlapCfg
    from nemo2.overlap.tp_overlap_cfg import PipelineOverlapCfg as PipelineOverlapCfg
    from nemo2.overlap.tp_overlap_cfg import RingExchangeOverlapCfg as RingExchangeOverlapCfg
    from nemo2.overlap.tp_overlap_cfg import TPOverlapCfg as TPOverlapCfg
    from nemo2.overlap.tp_overlap_cfg import TransformerLayerTPOverlapCfg as TransformerLayerTPOverlapCfg

_HOMES = {
    "BulkOverlapCfg": "nemo2.overlap.tp_overlap_cfg",
    "OverlapFacts": "nemo2.overlap.settings",
    "PipelineOverlapCfg": "nemo2.overlap.tp_overlap_cfg",
    "RingExchangeOverlapCfg": "nemo2.overlap.tp_overlap_cfg",
    "TPOverlapCfg": "nemo2.overlap.tp_overlap_cfg",
    "TransformerLayerTPOverlapCfg": "nemo2.overlap.tp_overlap_cfg",
    "decide": "nemo2.overlap.rules",
    "preset": "nemo2.overlap.presets",
    "preset_names": "nemo2.overlap.presets",
}

__all__ = list(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
