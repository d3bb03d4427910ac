# SPDX-License-Identifier: Apache-2.0
"""Estimates the remaining time of a run."""

import time
from typing import Any, Optional

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Timer

from nemo2.callbacks.consumption import consumed_by, seconds_per
from nemo2.config.capture import configurable
from nemo2.training.run_dir.progress import total_steps


@configurable
class RuntimeEstimator(pl.Callback):
    """Log the remaining and the elapsed time on the steps that log.

    - ``time/remaining_estimate``: the remaining steps times the mean time of this process's steps so far. Both include
      validation and checkpoints. At most the time left by ``trainer.max_time``.
    - ``time/total``: the time since training began in this process.
    - ``time/tokens``, ``time/samples``, ``time/batches``: the amounts consumed so far, including those before a resume.

    The first step, which compiles and allocates, counts in ``time/total`` only. A run without an end has no estimate.
    Steps that don't log cost nothing.

    Args:
        time_unit: "seconds", "minutes", "hours" or "days".

    Raises:
        ConfigError: another unit.
    """

    only_one = True

    def __init__(self, time_unit: str = "hours") -> None:
        self.time_unit = time_unit
        self.divider = seconds_per(time_unit, of="RuntimeEstimator")
        self._began = 0.0
        self._second: Optional[tuple[float, int]] = None
        """The time at which the second step began, and its number."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._began, self._second = time.perf_counter(), None

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any) -> None:
        now, step = time.perf_counter(), trainer.global_step
        pace = None
        if self._second is None:
            self._second = now, step
        elif step > self._second[1]:
            pace = (now - self._second[0]) / (step - self._second[1])
        if not trainer._logger_connector.should_update_logs:
            return
        samples, tokens = consumed_by(trainer)
        figures = {"total": (now - self._began) / self.divider, "tokens": tokens, "samples": samples, "batches": step}
        last = total_steps(trainer)
        if pace is not None and last is not None:
            remaining = max(last - step, 0) * pace
            callbacks: Any = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
            limits = [callback.time_remaining() for callback in callbacks if isinstance(callback, Timer)]
            known = [limit for limit in (remaining, *limits) if limit is not None]
            figures["remaining_estimate"] = min(known) / self.divider
        for name, value in figures.items():
            pl_module.log(f"time/{name}", float(value), batch_size=1)
