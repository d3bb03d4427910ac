# SPDX-License-Identifier: Apache-2.0
"""The factories that overrides find by name (`nemo2.config.factories`), by the kind of part that they create."""

import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from nemo2 import recipes
from nemo2.config.factories import Source


def _public_functions(module: Any) -> list[str]:
    functions = inspect.getmembers(module, inspect.isfunction)
    return [name for name, function in functions if function.__module__ == module.__name__ and not name.startswith("_")]


def _from(home: str, gives: str, names: Sequence[str] | Callable[[Any], Sequence[str]] = _public_functions) -> Source:
    """The functions and classes of a module that ``names`` lists. A function lists them when they are first needed."""
    listed = (lambda: names(import_module(home))) if callable(names) else lambda: names
    return Source(gives, listed, lambda name: getattr(import_module(home), name))


def _of_recipe(part: str) -> Callable[[str], Callable[..., Any]]:
    return lambda name: getattr(recipes.get(name), part)


def _peft_methods() -> dict[str, Any]:
    from nemo2.llm.peft import PEFT_STR2CLS

    return PEFT_STR2CLS


_LOG = "nemo2.recipes.log.default"
_OPTIMIZER = "nemo2.mcore.optim.megatron:MegatronOptimizerModule"
_TORCH_OPTIMIZER = "nemo2.mcore.optim.pytorch:PytorchOptimizerModule"
_DATA = "nemo2.data.base:MegatronDataModule"
_CALLBACK = "lightning.pytorch.callbacks:Callback"

SOURCES = [
    Source("nemo2.models.gpt:GPTModel", recipes.names, _of_recipe("model")),
    Source("nemo2.training.trainer:Trainer", recipes.names, _of_recipe("trainer")),
    _from("nemo2", "lightning.pytorch.strategies:Strategy", ["MegatronStrategy", "FSDP2Strategy", "FSDPStrategy"]),
    _from("nemo2.recipes.precision.mixed_precision", "nemo2.mcore.precision:MegatronMixedPrecision"),
    _from("nemo2.recipes.optim.adam", _OPTIMIZER),
    _from("nemo2.recipes.optim.sgd", _TORCH_OPTIMIZER),
    _from("nemo2.mcore.optim.pytorch", _TORCH_OPTIMIZER, ["PytorchOptimizerModule"]),
    _from("nemo2.mcore.optim.distributed_fused_adam", _OPTIMIZER, ["distributed_fused_adam"]),
    _from("nemo2.mcore.optim.megatron", _OPTIMIZER, ["MegatronOptimizerModule"]),
    _from(
        "nemo2.mcore.optim.lr_scheduler",
        "nemo2.mcore.optim.lr_scheduler:WarmupAnnealingScheduler",
        lambda module: [name for name in vars(module) if name.endswith("Scheduler")],
    ),
    _from(_LOG, "nemo2.training.run_dir.logger:NeMoLogger", ["default_log"]),
    _from(_LOG, "nemo2.checkpoint.auto_resume:AutoResume", ["default_resume"]),
    _from(_LOG, "lightning.pytorch.loggers:TensorBoardLogger", ["tensorboard_logger"]),
    _from("nemo2.recipes.data.default", _DATA),
    _from("nemo2.llm", _DATA, ["MockDataModule", "PreTrainingDataModule", "FineTuningDataModule", "ChatDataModule"]),
    _from(
        "nemo2.llm",
        _DATA,
        ["StdlibDocstringDataModule", "SquadDataModule", "DollyDataModule", "AlpacaDataModule", "HFDatasetDataModule"],
    ),
    _from(
        "nemo2.data",
        "nemo2.data.tokenizer:Tokenizer",
        ["AutoTokenizer", "BPETokenizer", "ByteTokenizer", "GPT2BPETokenizer", "NullTokenizer"],
    ),
    Source("nemo2.models.peft.base:PEFT", _peft_methods, lambda name: _peft_methods()[name]),
    _from("nemo2.llm", "nemo2.data.finetuning.packing:PackedSequenceSpecs", ["PackedSequenceSpecs"]),
    _from("nemo2.recipes.callbacks.common", _CALLBACK),
    _from("nemo2.callbacks", _CALLBACK, lambda module: module.__all__),
]
