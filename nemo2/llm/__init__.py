# SPDX-License-Identifier: Apache-2.0
"""``from nemo2 import llm``: what a training script names, imported on first use.

The entry points (``pretrain``, ``validate``, ``generate``), models and their sizes, data modules, and every recipe by
name (``llm.llama3_8b.pretrain_recipe()``).
"""

from typing import TYPE_CHECKING

from nemo2.lazy import lazy_names
from nemo2.recipes import names as _recipe_names

if TYPE_CHECKING:
    from nemo2.data.demo import StdlibDataModule as StdlibDataModule
    from nemo2.data.mock import MockDataModule as MockDataModule
    from nemo2.data.pretraining import PreTrainingDataModule as PreTrainingDataModule
    from nemo2.llm.api import generate as generate
    from nemo2.llm.api import pretrain as pretrain
    from nemo2.llm.api import train as train
    from nemo2.llm.api import validate as validate
    from nemo2.models.gpt import GPTConfig as GPTConfig
    from nemo2.models.gpt import GPTModel as GPTModel
    from nemo2.models.gpt_step import gpt_data_step as gpt_data_step
    from nemo2.models.gpt_step import gpt_forward_step as gpt_forward_step
    from nemo2.models.llama import Llama2Config7B as Llama2Config7B
    from nemo2.models.llama import Llama2Config13B as Llama2Config13B
    from nemo2.models.llama import Llama2Config70B as Llama2Config70B
    from nemo2.models.llama import Llama3Config as Llama3Config
    from nemo2.models.llama import Llama3Config8B as Llama3Config8B
    from nemo2.models.llama import Llama3Config70B as Llama3Config70B
    from nemo2.models.llama import Llama31Config as Llama31Config
    from nemo2.models.llama import Llama31Config8B as Llama31Config8B
    from nemo2.models.llama import Llama31Config70B as Llama31Config70B
    from nemo2.models.llama import Llama31Config405B as Llama31Config405B
    from nemo2.models.llama import Llama32Config1B as Llama32Config1B
    from nemo2.models.llama import Llama32Config3B as Llama32Config3B
    from nemo2.models.llama import LlamaConfig as LlamaConfig
    from nemo2.models.llama import LlamaModel as LlamaModel
    from nemo2.recipes import llama3_8b as llama3_8b
    from nemo2.recipes import llama32_1b as llama32_1b
    from nemo2.recipes import llama_tiny as llama_tiny

_HOMES = {
    "GPTConfig": "nemo2.models.gpt",
    "GPTModel": "nemo2.models.gpt",
    "Llama2Config13B": "nemo2.models.llama",
    "Llama2Config70B": "nemo2.models.llama",
    "Llama2Config7B": "nemo2.models.llama",
    "Llama31Config": "nemo2.models.llama",
    "Llama31Config405B": "nemo2.models.llama",
    "Llama31Config70B": "nemo2.models.llama",
    "Llama31Config8B": "nemo2.models.llama",
    "Llama32Config1B": "nemo2.models.llama",
    "Llama32Config3B": "nemo2.models.llama",
    "Llama3Config": "nemo2.models.llama",
    "Llama3Config70B": "nemo2.models.llama",
    "Llama3Config8B": "nemo2.models.llama",
    "LlamaConfig": "nemo2.models.llama",
    "LlamaModel": "nemo2.models.llama",
    "MockDataModule": "nemo2.data.mock",
    "PreTrainingDataModule": "nemo2.data.pretraining",
    "StdlibDataModule": "nemo2.data.demo",
    "generate": "nemo2.llm.api",
    "gpt_data_step": "nemo2.models.gpt_step",
    "gpt_forward_step": "nemo2.models.gpt_step",
    "pretrain": "nemo2.llm.api",
    "recipes": "nemo2.recipes",
    "train": "nemo2.llm.api",
    "validate": "nemo2.llm.api",
    **{name: f"nemo2.recipes.{name}" for name in _recipe_names()},
}

__all__ = list(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
