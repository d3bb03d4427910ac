# SPDX-License-Identifier: Apache-2.0
"""Freezes modules for a range of steps."""

import math
from collections.abc import Iterator
from typing import Any, Optional, Union

import lightning.pytorch as pl
import torch
from torch import Tensor

from nemo2.base.errors import ConfigError
from nemo2.config.capture import configurable
from nemo2.mcore.parallel.inspection import (
    belongs_to,
    chunks_of,
    named_parameters,
    owned_gradients,
    refuse_modules_outside,
    refuse_unknown_modules,
)
from nemo2.mcore.parallel.transform import full_names


@configurable
class LayerFreezer(pl.Callback):
    """Freeze modules during the steps of a schedule and train them in all other steps.

    In a frozen step a module is in evaluation mode. Its gradients count neither for updates nor for the gradient norm
    that other parameters are clipped by. The optimizer changes neither the module's parameters nor their optimizer
    state.

    The gradients of frozen modules are still computed. To freeze modules for the whole run at a lower cost, use a
    ``model_transform``, which freezes before gradient memory is allocated. The callback acts on every rank and pipeline
    stage. Each step costs zeroing the frozen gradients.

    Args:
        schedule: The full names of modules in the whole model, such as ``decoder.layers.0``. A list freezes its modules
            for the whole run. A dictionary gives the frozen steps of each module: -1 for the whole run, N for the first
            N steps, ``[start, end]`` for the steps from ``start`` to ``end``, counted from 0 and both included. An
            ``end`` of -1 is the end of the run.

    Raises:
        ConfigError: a schedule without steps. When training begins: a module that the model doesn't have.
    """

    def __init__(self, schedule: Union[list[str], dict[str, Any]]) -> None:
        if not isinstance(schedule, dict | list | tuple):
            raise ConfigError(
                f"LayerFreezer.schedule={schedule!r}: must be a list of modules, or a dictionary of their steps."
            )
        self.schedule = schedule
        steps = schedule if isinstance(schedule, dict) else dict.fromkeys(schedule, -1)
        self._steps = {name: _range_of(name, spec) for name, spec in steps.items()}
        self._frozen: set[str] = set()
        self._hooks: list[Any] = []

    def check_model(self, config: Any) -> None:
        """Raise the error of `on_train_start` about modules, except those below a layer."""
        from nemo2.models.conversion.families import modules_with_weights

        names = modules_with_weights(config) or ()
        unknown = [module for module in self._steps if not any(belongs_to(module, name) for name in names)]
        if names:
            refuse_modules_outside(names, unknown, of="LayerFreezer.schedule")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        refuse_unknown_modules(trainer, list(self._steps), of="LayerFreezer.schedule")
        self._frozen = set()
        for optimizer in trainer.strategy.optimizers:
            if make_state := getattr(optimizer, "make_state", None):
                make_state()  # torch's would begin to count the updates of a parameter with its first gradient
        self._hooks = [
            inner.register_step_pre_hook(self._leave_out(trainer, model_parameters))
            for inner, model_parameters in _inner_optimizers(trainer.strategy.optimizers)
        ]

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        now = {name for name, (first, last) in self._steps.items() if first <= trainer.global_step <= last}
        if now != self._frozen:
            for changed in now ^ self._frozen:
                for module in _modules(trainer, changed):
                    module.train(changed not in now)
            self._frozen = now

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        for name, _, owned in owned_gradients(trainer) if self._frozen else ():
            if owned.whole is not None and self._is_frozen(name):
                owned.whole.zero_()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _is_frozen(self, name: str) -> bool:
        return any(belongs_to(name, module) for module in self._frozen)

    def _leave_out(self, trainer: Any, model_parameters: dict[int, Tensor]) -> Any:
        """Remove the frozen gradients from torch's optimizer, which skips parameters without a gradient. Their updates are
        counted all the same, as fused optimizers do: a checkpoint has one count for all parameters."""

        def hook(inner: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if not self._frozen:
                return
            frozen = {id(parameter) for name, parameter in named_parameters(trainer) if self._is_frozen(name)}
            for group in inner.param_groups:
                for kept in group["params"]:
                    if id(model_parameters.get(id(kept), kept)) in frozen:
                        kept.grad = None
                        if isinstance(step := inner.state.get(kept, {}).get("step"), Tensor):
                            step += 1
                        if hasattr(kept, "decoupled_grad"):
                            kept.decoupled_grad = None

        return hook


def _range_of(name: str, spec: Any) -> tuple[float, float]:
    is_index = isinstance(spec, int) and not isinstance(spec, bool)
    if is_index and spec == -1:
        return 0, math.inf
    if is_index and spec > 0:
        return 0, spec - 1
    if isinstance(spec, list | tuple) and len(spec) == 2 and all(isinstance(one, int) for one in spec):
        first, last = max(spec[0], 0), math.inf if spec[1] < 0 else spec[1]
        if first <= last:
            return first, last
    raise ConfigError(
        f"LayerFreezer.schedule[{name!r}]={spec!r}: must be -1 (always frozen), a number of steps, or [first step, "
        "last step]."
    )


def _modules(trainer: Any, name: str) -> Iterator[torch.nn.Module]:
    from nemo2.mcore.parallel.plain_chunk import PlainChunk  # imports Megatron-Core

    for chunk in chunks_of(trainer):
        full = full_names(chunk.module if isinstance(chunk, PlainChunk) else chunk)
        for path, module in chunk.named_modules():
            if full.get(path) == name.removeprefix("module."):
                yield module


def _inner_optimizers(optimizers: list[Any]) -> Iterator[tuple[torch.optim.Optimizer, dict[int, Tensor]]]:
    """The torch optimizers inside nemo2's and Megatron-Core's, each with the model's parameters by the id of the
    copies or shards that it updates."""
    for optimizer in optimizers:
        mcore: Optional[Any] = getattr(optimizer, "mcore_optimizer", None)
        if mcore is None:
            yield getattr(optimizer, "optimizer", optimizer), {}
            continue
        for one in getattr(mcore, "chained_optimizers", [mcore]):
            yield one.optimizer, {id(kept): own for own, kept in _pairs(one)}


def _pairs(mcore: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """The model's parameters with the tensors that the optimizer updates for them."""
    for models, kepts in (
        ("model_float16_groups", "shard_fp32_from_float16_groups"),
        ("model_float16_groups", "shard_float16_groups"),
        ("model_fp32_groups", "shard_fp32_groups"),
        ("float16_groups", "fp32_from_float16_groups"),
    ):
        for own_group, kept_group in zip(getattr(mcore, models, []), getattr(mcore, kepts, []), strict=False):
            yield from ((own, kept) for own, kept in zip(own_group, kept_group, strict=False) if kept is not None)
