# SPDX-License-Identifier: Apache-2.0
"""The arguments of a live strategy as attributes, readable at any time and writable until the strategy is connected to
a model.

NeMo's scripts read ``trainer.strategy.tensor_model_parallel_size`` and set sizes on an existing strategy. Values that
were used in the connection can't be changed afterwards. An unknown name is rejected, because it would be stored and
never read.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from nemo2.base.errors import ConfigError
from nemo2.config.aliases import parameter_names
from nemo2.config.capture import captured_arguments, is_being_made, recapture, unknown_name
from nemo2.config.dtypes import read_dtype
from nemo2.config.provenance import note_explicit_fields
from nemo2.mcore.parallel.layout import LAYOUT_FIELDS, Layout, ParallelismConfig
from nemo2.training.strategies.megatron_config import strictness_of

_STORED_AS: Mapping[str, str] = {
    "ckpt_load_optimizer": "form.load_optimizer",
    "ckpt_save_optimizer": "form.save_optimizer",
    "ckpt_load_main_params": "form.load_main_params",
    "ckpt_load_strictness": "form.strictness",
    "ckpt_parallel_save_optim": "form.fully_reshardable",
    "ckpt_save_part": "form.part",
    "ckpt_async_save": "async_save",
    "ddp": "ddp_config",
    "megatron_log_level": "_megatron_log_level",
}
"""Arguments that are stored only under another name."""
_WRITABLE = frozenset(_STORED_AS) - {"ddp", "ckpt_async_save"}
_SIZES = frozenset(ParallelismConfig.__annotations__) - {"pipeline_model_parallel_comm_backend"}


class LiveSettings:
    """The settings of a live strategy with a ``parallelism`` and captured arguments."""

    parallelism: ParallelismConfig

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "parallelism" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name == "pipeline_dtype":
            dtypes = getattr(self.precision_plugin, "dtype_config", None)
            return self.parallelism.pipeline_dtype or getattr(dtypes, "pipeline_dtype", None)
        if name in _SIZES:
            return getattr(self.parallelism, name)
        if name in _STORED_AS:
            owner, attribute = _owner(self, name)
            return owner.__dict__.get(attribute, _default(type(self), name))
        if name in parameter_names(type(self)):
            return (captured_arguments(self) or {}).get(name, _default(type(self), name))
        raise unknown_name(type(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        is_constructed = "parallelism" in self.__dict__ and not is_being_made(self)
        own = name.startswith("_") or name in self.__dict__ or _declared(type(self), name)
        if not is_constructed or (own and name not in _SIZES):
            object.__setattr__(self, name, value)
            return
        if name not in parameter_names(type(self)):
            raise unknown_name(type(self), name)
        if self.__dict__.get("_lightning_module") is not None:
            raise ConfigError(
                f"strategy.{name}={value!r}: the strategy is already connected to a model with "
                f"{name}={getattr(self, name)!r}. Set {name} before the trainer runs, or pass it to "
                f"{type(self).__name__}(...)."
            )
        value = read_dtype(type(self), name, value)
        if name in _SIZES:
            self._resize(name, value)
        elif name in _WRITABLE:
            owner, attribute = _owner(self, name)
            owner.__dict__[attribute] = strictness_of(value) if name == "ckpt_load_strictness" else value
        else:
            raise ConfigError(
                f"strategy.{name}={value!r}: {name} is read only when the strategy is created. Pass it to "
                f"{type(self).__name__}(...)."
            )
        recapture(self, name, value)

    def _resize(self, name: str, value: Any) -> None:
        sizes = {short: getattr(self.parallelism, full) for short, full in LAYOUT_FIELDS.items()}
        short = next((short for short, full in LAYOUT_FIELDS.items() if full == name), None)
        if short is not None:
            Layout(**(sizes | {short: value}))  # refuses a wrong size
        setattr(self.parallelism, name, value)
        if name == "pipeline_dtype":
            note_explicit_fields(self.parallelism, {name: value})

    @property
    def layout(self) -> Layout:
        """The parallel sizes."""
        return Layout.of(self.parallelism)

    @property
    def use_te_rng_tracker(self) -> bool:
        """Whether random streams are Transformer Engine's. CUDA graphs turn it on."""
        return self.parallelism.use_te_rng_tracker

    @property
    def current_epoch_step(self) -> int:
        """The optimizer steps in the current epoch. 0 before the strategy has a trainer."""
        if "trainer" not in self.__dict__:
            return 0
        loop: Any = self.__dict__["trainer"].fit_loop.epoch_loop
        return max(
            loop.automatic_optimization.optim_progress.optimizer.step.current.completed,
            loop.manual_optimization.optim_step_progress.current.completed,
        )


def _owner(strategy: Any, name: str) -> tuple[Any, str]:
    """The object that stores an argument, the strategy or the form of its checkpoints, and the argument's name
    there."""
    owner, _, attribute = _STORED_AS[name].rpartition(".")
    return (strategy.__dict__[owner] if owner else strategy), attribute


def _default(cls: type, name: str) -> Any:
    return inspect.signature(cls).parameters[name].default


def _declared(cls: type, name: str) -> bool:
    return hasattr(cls, name) or any(name in getattr(base, "__annotations__", {}) for base in cls.__mro__)
