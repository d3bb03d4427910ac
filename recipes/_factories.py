# SPDX-License-Identifier: Apache-2.0
"""The factories that overrides find by name (`nemo2.config.factories`), by the kind of part that they create."""

import inspect
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

from nemo2.config.factories import Source


def _functions(home: str) -> Callable[[], Iterable[str]]:
    def names() -> list[str]:
        functions = inspect.getmembers(import_module(home), inspect.isfunction)
        return [name for name, function in functions if function.__module__ == home and not name.startswith("_")]

    return names


def _from(home: str, gives: str, names: Iterable[str] | None = None) -> Source:
    """The functions and classes of a module. ``names=None``: its public functions."""
    listed = _functions(home) if names is None else lambda: names
    return Source(gives, listed, lambda name: getattr(import_module(home), name))


def _recipes() -> list[str]:
    from nemo2 import recipes

    return recipes.names()


def _of_recipe(part: str) -> Callable[[str], Callable[..., Any]]:
    def load(name: str) -> Callable[..., Any]:
        from nemo2 import recipes

        return getattr(recipes.get(name), part)

    return load


def _callbacks() -> list[str]:
    from nemo2 import callbacks

    return list(vars(callbacks)["__all__"])


def _peft_methods() -> dict[str, Any]:
    from nemo2.llm.peft import PEFT_STR2CLS

    return PEFT_STR2CLS


def _schedules() -> list[str]:
    from nemo2.mcore.optim import lr_scheduler

    return [name for name in vars(lr_scheduler) if name.endswith("Scheduler")]


_LOG = "nemo2.recipes.log.default"
_OPTIMIZER = "nemo2.mcore.optim.megatron:MegatronOptimizerModule"
_TORCH_OPTIMIZER = "nemo2.mcore.optim.pytorch:PytorchOptimizerModule"
_DATA = "nemo2.data.base:MegatronDataModule"
_CALLBACK = "lightning.pytorch.callbacks:Callback"

SOURCES = [
    Source("nemo2.models.gpt:GPTModel", _recipes, _of_recipe("model")),
    Source("nemo2.training.trainer:Trainer", _recipes, _of_recipe("trainer")),
    _from("nemo2", "lightning.pytorch.strategies:Strategy", ["MegatronStrategy", "FSDP2Strategy", "FSDPStrategy"]),
    _from("nemo2.recipes.precision.mixed_precision", "nemo2.mcore.precision:MegatronMixedPrecision"),
    _from("nemo2.recipes.optim.adam", _OPTIMIZER),
    _from("nemo2.recipes.optim.sgd", _TORCH_OPTIMIZER),
    _from("nemo2.mcore.optim.pytorch", _TORCH_OPTIMIZER, ["PytorchOptimizerModule"]),
    _from("nemo2.mcore.optim.distributed_fused_adam", _OPTIMIZER, ["distributed_fused_adam"]),
    _from("nemo2.mcore.optim.megatron", _OPTIMIZER, ["MegatronOptimizerModule"]),
    Source(
        "nemo2.mcore.optim.lr_scheduler:WarmupAnnealingScheduler",
        _schedules,
        lambda name: getattr(import_module("nemo2.mcore.optim.lr_scheduler"), name),
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
    Source("nemo2.models.peft.base:PEFT", lambda: _peft_methods(), lambda name: _peft_methods()[name]),
    _from("nemo2.llm", "nemo2.data.finetuning.packing:PackedSequenceSpecs", ["PackedSequenceSpecs"]),
    _from("nemo2.recipes.callbacks.common", _CALLBACK),
    Source(_CALLBACK, _callbacks, lambda name: getattr(import_module("nemo2.callbacks"), name)),
]
