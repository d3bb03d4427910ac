# SPDX-License-Identifier: Apache-2.0
"""Shows a run's progress: a bar on a terminal, one parseable line per logged step everywhere else.

Both forms are Lightning progress bars that listen like a logger. A logger is called on logging steps only, after every
callback has logged, with the values already on the host. Other steps run nothing here and don't wait for the device.
"""

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import IO, Any, Optional

from lightning.pytorch.callbacks.progress.progress_bar import ProgressBar
from lightning.pytorch.loggers.logger import Logger

from nemo2.base.place import is_terminal
from nemo2.config.capture import configurable
from nemo2.training.run_dir.progress_line import format_line

_NEVER_AVERAGED = frozenset({"global_step", "step", "consumed_samples", "global_batch_size", "lr", "epoch"})


class _Listener(Logger):
    """Forward Lightning's logged values to a progress bar."""

    def __init__(self, target: "LoggedStepProgress") -> None:
        super().__init__()
        self.target = target

    @property
    def name(self) -> Optional[str]:
        return None

    @property
    def version(self) -> Optional[str]:
        return None

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Does nothing."""

    def log_metrics(self, metrics: Mapping[str, float], step: Optional[int] = None) -> None:
        self.target.on_logged(metrics, step=step)


class LoggedStepProgress(ProgressBar, ABC):
    """Base class of both forms, which receives logged steps on rank 0. Subclasses define ``show_training``."""

    def __init__(self) -> None:
        super().__init__()
        self._listener = _Listener(self)
        self._enabled = True

    def enable(self) -> None:
        self._enabled = True

    def disable(self) -> None:
        self._enabled = False

    @property
    def is_disabled(self) -> bool:
        return not self._enabled

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if not trainer.is_global_zero:
            self.disable()
        if self._listener not in trainer.loggers:
            trainer.loggers = [*trainer.loggers, self._listener]

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.end()
        trainer.loggers = [logger for logger in trainer.loggers if logger is not self._listener]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self._enabled:
            self.begin(total=total_steps(trainer), completed=trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.end()

    def on_logged(self, metrics: Mapping[str, float], *, step: Optional[int]) -> None:
        """Called by the listener with every set of logged values."""
        if not self._enabled or step is None:
            return
        # The loggers' axis may count finished steps. `global_step` is the number of this step.
        step = int(metrics.get("global_step", step))
        shown = {
            name: float(value)
            for name, value in metrics.items()
            if name not in ("epoch", "step") and isinstance(value, int | float)
        }
        stage = self._evaluated(shown)
        if stage is not None:
            self.show_validation(step=step, metrics=shown, stage=stage)
        elif shown:
            self.show_training(step=step, metrics=shown)

    def _evaluated(self, metrics: Mapping[str, float]) -> Optional[str]:
        """The stage that logged ``metrics``: "Validation" or "Test". None: training."""
        if "reduced_train_loss" in metrics:
            return None
        if self._trainer is not None and self._trainer.testing:
            return "Test"
        return "Validation" if any(name.startswith("val") for name in metrics) else None

    def begin(self, *, total: Optional[int], completed: int) -> None:
        """Training starts with ``completed`` of ``total`` steps done. A ``total`` of None: no known end."""

    def end(self) -> None:
        """Training has ended, in whatever way. May be called more than once."""

    @abstractmethod
    def show_training(self, *, step: int, metrics: dict[str, float]) -> None:
        """The values of the logged step number ``step``, counted from zero."""

    def show_validation(self, *, step: int, metrics: dict[str, float], stage: str = "Validation") -> None:
        """The values of a validation or a test after step number ``step``."""
        self.show_training(step=step, metrics=metrics)


@configurable
class ProgressPrinter(LoggedStepProgress):
    """Print ``Training epoch 0, iteration 0/29 | lr: ... | reduced_train_loss: ...`` for logged steps, on rank 0.

    Only logging steps cost anything: one formatted line.
    """

    def __init__(
        self,
        log_interval: int = 1,
        skip_accumulate_metrics: Sequence[str] = ("global_step",),
        exclude_metrics: Sequence[str] = ("v_num",),
    ) -> None:
        """
        Args:
            log_interval: print every this many logged steps. 0 or less: print nothing.
            skip_accumulate_metrics: metrics shown with their newest value. Other metrics are averaged over the logged
                steps since the last line, except counters and the learning rate.
            exclude_metrics: metrics that are not printed.
        """
        super().__init__()
        self.log_interval = int(log_interval)
        self.skip_accumulate_metrics = list(skip_accumulate_metrics)
        self.exclude_metrics = list(exclude_metrics)
        self._last_step: Optional[int] = None
        self._sums: dict[str, list[float]] = {}
        self._count = 0
        if self.log_interval <= 0:
            self.disable()

    def enable(self) -> None:
        if self.log_interval > 0:
            super().enable()

    def begin(self, *, total: Optional[int], completed: int) -> None:
        self._last_step = None if total is None else total - 1
        self._sums, self._count = {}, 0

    def show_training(self, *, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._sums.setdefault(name, []).append(value)
        self._count += 1
        if self._count < self.log_interval:
            return
        averages = {name: self._value(name, values) for name, values in self._sums.items()}
        self._sums, self._count = {}, 0
        self._print("Training", step, averages)

    def show_validation(self, *, step: int, metrics: dict[str, float], stage: str = "Validation") -> None:
        self._print(stage, step, metrics)

    def _value(self, name: str, values: list[float]) -> float:
        if name in self.skip_accumulate_metrics or name in _NEVER_AVERAGED:
            return values[-1]
        return math.fsum(values) / len(values) if all(map(math.isfinite, values)) else sum(values) / len(values)

    def _print(self, stage: str, step: int, metrics: dict[str, float]) -> None:
        epoch = self._trainer.current_epoch if self._trainer is not None else 0
        shown = {name: value for name, value in metrics.items() if name not in self.exclude_metrics}
        print(
            format_line(stage, epoch=epoch, step=step, last_step=self._last_step, metrics=shown),
            flush=True,
        )


@configurable
class MegatronProgressBar(LoggedStepProgress):
    """Show a rich bar over the steps of the run (global batches), with loss, validation loss, speed and remaining time.

    The bar appears on rank 0 if the run owns a terminal, and moves on logging steps.
    """

    def __init__(self) -> None:
        from nemo2.training.run_dir.bar import TrainingBar

        super().__init__()
        self._bar = TrainingBar()

    def begin(self, *, total: Optional[int], completed: int) -> None:
        self._bar.start(total=total, completed=completed)

    def end(self) -> None:
        self._bar.stop()

    def show_training(self, *, step: int, metrics: dict[str, float]) -> None:
        self._bar.update(completed=step + 1, metrics=metrics)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._bar.describe("validating")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._bar.describe("training")


def make_progress(trainer: Any = None, *, stream: Optional[IO[str]] = None) -> LoggedStepProgress:
    """The progress display for the kind of output: a bar on a terminal, lines in a file, a pipe or a notebook.

    Args:
        trainer: Supplies its rank, so that other ranks don't create a bar. None: rank 0.
        stream: The output. None: standard output.
    """
    on_rank_0 = getattr(trainer, "is_global_zero", True)
    return MegatronProgressBar() if on_rank_0 and is_terminal(stream or sys.stdout) else ProgressPrinter()


def total_steps(trainer: Any) -> Optional[int]:
    """The number of optimizer steps at the run's planned end, by ``max_steps`` and ``max_epochs``. None: there is no
    such number."""
    estimate = trainer.estimated_stepping_batches
    return int(estimate) if math.isfinite(estimate) else None
