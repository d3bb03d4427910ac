# SPDX-License-Identifier: Apache-2.0
"""Logs the throughput of the last steps."""

import time
from collections import deque
from typing import Any

import lightning.pytorch as pl

from nemo2.base.counts import require_counts
from nemo2.callbacks.consumption import consumed_by, sampler_of, seconds_per
from nemo2.config.capture import configurable


@configurable
class SpeedMonitor(pl.Callback):
    """Log the throughput of the last ``window_size`` steps on the steps that log.

    - ``throughput/batches_per_sec`` (global batches), ``throughput/samples_per_sec``, ``throughput/tokens_per_sec``
    - the same values per device, under ``throughput/device/``
    - ``throughput/micro_batch_size``, ``throughput/global_batch_size``
    - ``time/train``, ``time/val``: the time of this process so far

    The time of a step includes everything since the step before, such as waiting for data and saving, but not
    validation. Samples and tokens need a data sampler. Steps that don't log read the clock once.

    Args:
        window_size: The number of steps in the window. The first values appear at the second step.
        time_unit: The unit of ``time/train`` and ``time/val``: "seconds", "minutes", "hours" or "days".

    Raises:
        ConfigError: another unit, or a window of less than one step.
    """

    only_one = True

    def __init__(self, window_size: int = 100, time_unit: str = "hours") -> None:
        require_counts("SpeedMonitor", window_size=window_size)
        self.window_size = window_size
        self.time_unit = time_unit
        self.divider = seconds_per(time_unit, of="SpeedMonitor")
        self._marks: deque[tuple[float, int, int]] = deque(maxlen=window_size + 1)
        self._train = self._validation = self._since = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._train = self._validation = 0.0
        self._since = time.perf_counter()
        self._marks.clear()
        self._mark(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any) -> None:
        self._mark(trainer)
        if not trainer._logger_connector.should_update_logs:
            return
        (began, samples_before, tokens_before), (now, samples, tokens) = self._marks[0], self._marks[-1]
        seconds = max(now - began, 1e-9)
        rates = {"batches_per_sec": (len(self._marks) - 1) / seconds}
        if (sampler := sampler_of(trainer)) is not None:
            rates |= {
                "samples_per_sec": (samples - samples_before) / seconds,
                "tokens_per_sec": (tokens - tokens_before) / seconds,
            }
            size = samples - self._marks[-2][1] or sampler.current_global_batch_size  # the latter is the next step's
            pl_module.log("throughput/micro_batch_size", float(sampler.micro_batch_size), batch_size=1)
            pl_module.log("throughput/global_batch_size", float(size), batch_size=1)
        for name, rate in rates.items():
            pl_module.log(f"throughput/{name}", rate, batch_size=1)
            pl_module.log(f"throughput/device/{name}", rate / trainer.world_size, batch_size=1)
        pl_module.log("time/train", now / self.divider, batch_size=1)
        pl_module.log("time/val", self._validation / self.divider, batch_size=1)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._train += time.perf_counter() - self._since
        self._since = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validation += time.perf_counter() - self._since
        self._since = time.perf_counter()

    def _mark(self, trainer: Any) -> None:
        self._marks.append((self._train + time.perf_counter() - self._since, *consumed_by(trainer)))
