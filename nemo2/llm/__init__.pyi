# SPDX-License-Identifier: Apache-2.0
from nemo2 import recipes as recipes
from nemo2.data.demo import StdlibDataModule as StdlibDataModule
from nemo2.data.finetuning.docstrings import StdlibDocstringDataModule as StdlibDocstringDataModule
from nemo2.data.finetuning.hf_dataset import HFDatasetDataModule as HFDatasetDataModule
from nemo2.data.finetuning.module import ChatDataModule as ChatDataModule
from nemo2.data.finetuning.module import FineTuningDataModule as FineTuningDataModule
from nemo2.data.finetuning.packing import PackedSequenceSpecs as PackedSequenceSpecs
from nemo2.data.finetuning.published import AlpacaDataModule as AlpacaDataModule
from nemo2.data.finetuning.published import DollyDataModule as DollyDataModule
from nemo2.data.finetuning.published import SquadDataModule as SquadDataModule
from nemo2.data.mock import MockDataModule as MockDataModule
from nemo2.data.pretraining import PreTrainingDataModule as PreTrainingDataModule
from nemo2.hugging_face.api import export_ckpt as export_ckpt
from nemo2.hugging_face.api import import_ckpt as import_ckpt
from nemo2.hugging_face.api import load_connector_from_trainer_ckpt as load_connector_from_trainer_ckpt
from nemo2.llm import fn as fn
from nemo2.llm import peft as peft
from nemo2.llm.api import finetune as finetune
from nemo2.llm.api import generate as generate
from nemo2.llm.api import pretrain as pretrain
from nemo2.llm.api import train as train
from nemo2.llm.api import validate as validate
from nemo2.llm.distillation import DistillationConfig as DistillationConfig
from nemo2.llm.distillation import distill as distill
from nemo2.llm.evaluation import evaluate as evaluate
from nemo2.llm.evaluation import perplexity as perplexity
from nemo2.llm.serving import deploy as deploy
from nemo2.models import *
from nemo2.models.gpt_step import get_batch_on_this_context_parallel_rank as get_batch_on_this_context_parallel_rank
from nemo2.models.gpt_step import get_packed_seq_params as get_packed_seq_params
from nemo2.parallel.loss import MaskedTokenLossReduction as MaskedTokenLossReduction
from nemo2.parallel.loss import MaskedTokenLossReductionWithLossMask as MaskedTokenLossReductionWithLossMask
from nemo2.parallel.loss import MegatronLossReduction as MegatronLossReduction
from nemo2.recipes import *
