# SPDX-License-Identifier: Apache-2.0
"""nemo2: LLM training recipes over PyTorch Lightning and Megatron-Core.

``import nemo2 as nl`` is the front door to what trains: the names of NeMo 2.0's ``nemo.lightning``, imported on first
use. Models, data and recipes have theirs in ``nemo2.llm``.
"""

from typing import TYPE_CHECKING

from nemo2.lazy import lazy_names
from nemo2.noise import quiet_known_warnings

if TYPE_CHECKING:
    from nemo2 import callbacks as callbacks
    from nemo2 import llm as llm
    from nemo2 import recipes as recipes
    from nemo2.checkpoint.auto_resume import AutoResume as AutoResume
    from nemo2.checkpoint.auto_resume import RestoreConfig as RestoreConfig
    from nemo2.checkpoint.model_checkpoint import ModelCheckpoint as ModelCheckpoint
    from nemo2.config import Config as Config
    from nemo2.config import Partial as Partial
    from nemo2.data.sampler import MegatronDataSampler as MegatronDataSampler
    from nemo2.data.tokenizer import get_vocab_size as get_vocab_size
    from nemo2.launch.launcher import run as run
    from nemo2.optim import lr_scheduler as lr_scheduler
    from nemo2.optim.base import OptimizerModule as OptimizerModule
    from nemo2.optim.lr_scheduler import LRSchedulerModule as LRSchedulerModule
    from nemo2.optim.megatron import MegatronOptimizerModule as MegatronOptimizerModule
    from nemo2.precision import MegatronMixedPrecision as MegatronMixedPrecision
    from nemo2.run_dir.logger import NeMoLogger as NeMoLogger
    from nemo2.strategies.fsdp import FSDPStrategy as FSDPStrategy
    from nemo2.strategies.fsdp2 import FSDP2Strategy as FSDP2Strategy
    from nemo2.strategy import MegatronStrategy as MegatronStrategy
    from nemo2.trainer import Trainer as Trainer

__version__ = "0.1.0"

_HOMES = {
    "AutoResume": "nemo2.checkpoint.auto_resume",
    "Config": "nemo2.config",
    "FSDP2Strategy": "nemo2.strategies.fsdp2",
    "FSDPStrategy": "nemo2.strategies.fsdp",
    "LRSchedulerModule": "nemo2.optim.lr_scheduler",
    "MegatronDataSampler": "nemo2.data.sampler",
    "MegatronMixedPrecision": "nemo2.precision",
    "MegatronOptimizerModule": "nemo2.optim.megatron",
    "MegatronStrategy": "nemo2.strategy",
    "ModelCheckpoint": "nemo2.checkpoint.model_checkpoint",
    "NeMoLogger": "nemo2.run_dir.logger",
    "OptimizerModule": "nemo2.optim.base",
    "Partial": "nemo2.config",
    "RestoreConfig": "nemo2.checkpoint.auto_resume",
    "Trainer": "nemo2.trainer",
    "callbacks": "nemo2.callbacks",
    "get_vocab_size": "nemo2.data.tokenizer",
    "llm": "nemo2.llm",
    "lr_scheduler": "nemo2.optim.lr_scheduler",
    "recipes": "nemo2.recipes",
    "run": "nemo2.launch.launcher",
}

# Here, because the warnings come while Megatron-Core is imported, by whichever of our modules is first.
quiet_known_warnings()

__all__ = list(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
