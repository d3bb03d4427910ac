# SPDX-License-Identifier: Apache-2.0
from nemo2 import recipes as recipes
from nemo2.data.demo import StdlibDataModule as StdlibDataModule
from nemo2.data.mock import MockDataModule as MockDataModule
from nemo2.data.pretraining import PreTrainingDataModule as PreTrainingDataModule
from nemo2.llm.api import generate as generate
from nemo2.llm.api import pretrain as pretrain
from nemo2.llm.api import train as train
from nemo2.llm.api import validate as validate
from nemo2.models import *
from nemo2.recipes import *
