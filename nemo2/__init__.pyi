# SPDX-License-Identifier: Apache-2.0
from nemo2 import callbacks as callbacks
from nemo2 import llm as llm
from nemo2 import recipes as recipes
from nemo2.checkpoint.auto_resume import AutoResume as AutoResume
from nemo2.checkpoint.auto_resume import RestoreConfig as RestoreConfig
from nemo2.checkpoint.model_checkpoint import ModelCheckpoint as ModelCheckpoint
from nemo2.config import Config as Config
from nemo2.config import Partial as Partial
from nemo2.data.sampler import MegatronDataSampler as MegatronDataSampler
from nemo2.launch.launcher import run as run
from nemo2.llm import io as io
from nemo2.mcore.optim import lr_scheduler as lr_scheduler
from nemo2.mcore.optim.base import OptimizerModule as OptimizerModule
from nemo2.mcore.optim.lr_scheduler import LRSchedulerModule as LRSchedulerModule
from nemo2.mcore.optim.megatron import MegatronOptimizerModule as MegatronOptimizerModule
from nemo2.mcore.optim.pytorch import PytorchOptimizerModule as PytorchOptimizerModule
from nemo2.mcore.precision import MegatronMixedPrecision as MegatronMixedPrecision
from nemo2.models.gpt import get_vocab_size as get_vocab_size
from nemo2.training.fabric import Fabric as Fabric
from nemo2.training.fabric import FabricMegatronMixedPrecision as FabricMegatronMixedPrecision
from nemo2.training.fabric import FabricMegatronStrategy as FabricMegatronStrategy
from nemo2.training.run_dir.logger import NeMoLogger as NeMoLogger
from nemo2.training.strategies.fsdp import FSDPStrategy as FSDPStrategy
from nemo2.training.strategies.fsdp2 import FSDP2Strategy as FSDP2Strategy
from nemo2.training.strategy import MegatronStrategy as MegatronStrategy
from nemo2.training.trainer import Trainer as Trainer

__version__: str
