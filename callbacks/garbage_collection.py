# SPDX-License-Identifier: Apache-2.0
"""Runs Python's garbage collector on every rank at the same steps."""

import gc
from typing import Any

import lightning.pytorch as pl

from nemo2.base.counts import require_counts
from nemo2.config.capture import configurable


@configurable
class GarbageCollectionCallback(pl.Callback):
    """Turn off automatic garbage collection during training and collect at an interval instead.

    A rank that collects makes all other ranks wait in the next collective. With thousands of ranks some rank is always
    collecting, unless all collect at the same step.

    The callback collects the young generations (a few milliseconds) every ``gc_interval_train`` training steps and
    every ``gc_interval_val`` validation batches. It collects all generations at the start of training and of each
    validation. When training ends or fails, it restores the collector's previous state.

    Args:
        gc_interval_train: Training steps between two collections.
        gc_interval_val: Validation batches between two collections.

    Raises:
        ConfigError: an interval below 1.
    """

    def __init__(self, gc_interval_train: int, gc_interval_val: int):
        require_counts(
            "GarbageCollectionCallback", gc_interval_train=gc_interval_train, gc_interval_val=gc_interval_val
        )
        self.gc_interval_train = gc_interval_train
        self.gc_interval_val = gc_interval_val
        self._was_enabled: bool | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._was_enabled = gc.isenabled()
        gc.disable()
        gc.collect()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_step % self.gc_interval_train == 0:
            gc.collect(1)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._was_enabled is not None:
            gc.collect()

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        if self._was_enabled is not None and (batch_idx + 1) % self.gc_interval_val == 0:
            gc.collect(1)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._restore()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._restore()

    def _restore(self) -> None:
        if self._was_enabled:
            gc.enable()
        self._was_enabled = None
