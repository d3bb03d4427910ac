# SPDX-License-Identifier: Apache-2.0
from nemo2.mcore.overlap.presets import preset as preset
from nemo2.mcore.overlap.presets import preset_names as preset_names
from nemo2.mcore.overlap.tp_overlap_cfg import BulkOverlapCfg as BulkOverlapCfg
from nemo2.mcore.overlap.tp_overlap_cfg import PipelineOverlapCfg as PipelineOverlapCfg
from nemo2.mcore.overlap.tp_overlap_cfg import RingExchangeOverlapCfg as RingExchangeOverlapCfg
from nemo2.mcore.overlap.tp_overlap_cfg import TPOverlapCfg as TPOverlapCfg
from nemo2.mcore.overlap.tp_overlap_cfg import TransformerLayerTPOverlapCfg as TransformerLayerTPOverlapCfg
