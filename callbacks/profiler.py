# SPDX-License-Identifier: Apache-2.0
"""Profiles a few steps with torch's profiler and writes one trace file per rank."""

import inspect
import logging
import os
from pathlib import Path
from typing import Any, Optional, Union

import lightning.pytorch as pl
import torch

from nemo2.base.counts import count_problems
from nemo2.base.errors import ConfigError
from nemo2.base.files import recording_to
from nemo2.base.names import did_you_mean
from nemo2.callbacks.steps import step_range_problems
from nemo2.config.capture import configurable
from nemo2.report.trace.report import TRACES
from nemo2.training.run_dir.directory import create_directory, directory_of

_log = logging.getLogger(__name__)
_OWNER = "PytorchProfilerCallback"


@configurable
class PytorchProfilerCallback(pl.Callback):
    """Write ``rank-N.json`` for every rank, a trace for `nemo2 runs trace`, chrome://tracing or Perfetto. An earlier trace in
    the folder is kept as ``rank-N.1.json``.

    Hooks: start and end of each training batch, and the end of training. Profiled steps are several times slower. Other
    steps cost two comparisons. On CPU ranks torch's profiler doesn't record the group of a collective, so the callback
    records every call of torch.distributed and adds it to the trace.

    Args:
        start_step: The first step of the warm-up or of the profile, counted from 0.
        end_step: The step before which profiling ends at the latest.
        warmup_steps: Steps in which the profiler runs without keeping its records, to exclude its own startup.
        active_steps: The number of steps in the trace.
        trace_dir: The folder of the files. None: ``traces`` in the run directory, or in the working directory without
            one.
        profiler_kwargs: Further arguments of ``torch.profiler.profile``, such as ``{"with_stack": True}``.

    Raises:
        ConfigError: steps that can't work, or an argument that torch's profiler doesn't have. At the start of training: the
            folder isn't writable.
    """

    written_to = "trace_dir"
    alone_in = ("start_step", "end_step")

    def __init__(
        self,
        start_step: int,
        end_step: int,
        warmup_steps: int = 0,
        active_steps: int = 1,
        trace_dir: Optional[Union[str, os.PathLike]] = None,
        profiler_kwargs: Optional[dict[str, Any]] = None,
    ) -> None:
        problems = [
            *step_range_problems(_OWNER, start_step, end_step),
            *count_problems(_OWNER, least=0, warmup_steps=warmup_steps),
            *count_problems(_OWNER, active_steps=active_steps),
        ]
        if not problems and end_step <= start_step + warmup_steps:
            problems.append(
                f"{_OWNER}.end_step={end_step} leaves no step to record after start_step={start_step} and "
                f"warmup_steps={warmup_steps}. Set end_step to {start_step + warmup_steps + 1} or more."
            )
        problems += _profiler_problems(profiler_kwargs or {})
        if problems:
            raise ConfigError("\n".join(problems))
        self.start_step = start_step
        self.end_step = end_step
        self.warmup_steps = warmup_steps
        self.active_steps = active_steps
        self.trace_dir = trace_dir
        self.profiler_kwargs = profiler_kwargs
        self._profiler: Any = None
        self._recorder: Any = None
        self._kept = 0
        self._begun = 0
        self._first = start_step + warmup_steps

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        create_directory(
            self._folder(trainer), field=f"{_OWNER}.trace_dir"
        )  # a failure must not end the run at its first trace
        self._begun = trainer.global_step

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        step = trainer.global_step
        if self._profiler is None and self._kept == 0 and self.start_step <= step < self.end_step:
            self._first = step + self.warmup_steps
            self._start()
        if self._profiler is not None and self._recorder is None and step >= self._first:
            self._record()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if self._profiler is None:
            return
        step = trainer.global_step
        if step > self._first:
            self._kept += 1
        if self._kept >= self.active_steps or step >= self.end_step:
            self._finish(trainer)
        else:
            self._profiler.step()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._profiler is not None and self._kept:
            self._finish(trainer)
            return
        self._stop()
        recorded_before = self._begun > self.start_step and self._file(trainer).exists()
        if self._kept == 0 and trainer.is_global_zero and not recorded_before:
            _log.warning(
                "%s recorded nothing: no step of this run was between start_step=%d, after warmup_steps=%d, and end_step=%d. It "
                "ended after step %d.",
                _OWNER,
                self.start_step,
                self.warmup_steps,
                self.end_step,
                trainer.global_step,
            )

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._recorder is not None:
            self._recorder.__exit__(None, None, None)
            self._recorder = None
        if self._profiler is not None:
            # A process has only one torch profiler, so a later run in this process could not start its own.
            self._profiler.stop()
            self._profiler = None

    def _start(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        options: dict[str, Any] = {
            "activities": activities,
            # One more than are kept: the profiler drops its trace when the last active step ends, and the trace is
            # written before that.
            "schedule": torch.profiler.schedule(wait=0, warmup=self.warmup_steps, active=self.active_steps + 1),
        }
        self._profiler = torch.profiler.profile(**options | (self.profiler_kwargs or {}))
        self._profiler.start()

    def _record(self) -> None:
        if torch.cuda.is_available() or not torch.distributed.is_initialized():
            return
        from nemo2.report.trace.recorder import CommunicationRecorder

        self._recorder = CommunicationRecorder()
        self._recorder.__enter__()

    def _finish(self, trainer: pl.Trainer) -> None:
        profiler, self._profiler = self._profiler, None
        messages = []
        if self._recorder is not None:
            self._recorder.__exit__(None, None, None)
            messages, self._recorder = self._recorder.communications, None
        profiler.stop()
        path = self._file(trainer)
        with recording_to(path, owner=_OWNER):
            profiler.export_chrome_trace(str(path))
            if messages:
                from nemo2.report.trace.chrome import add_communication

                add_communication(path, messages)

    def _file(self, trainer: pl.Trainer) -> Path:
        return self._folder(trainer) / f"rank-{trainer.global_rank}.json"

    def _folder(self, trainer: pl.Trainer) -> Path:
        return Path(self.trace_dir).expanduser() if self.trace_dir else directory_of(trainer) / TRACES


def _profiler_problems(options: dict[str, Any]) -> list[str]:
    """A sentence for each argument that ``torch.profiler.profile`` doesn't have, and for each switch that is no boolean."""
    parameters = inspect.signature(torch.profiler.profile).parameters
    problems = []
    for name, value in options.items():
        if name not in parameters:
            problems.append(
                f"{_OWNER}.profiler_kwargs: torch's profiler has no argument {name!r}{did_you_mean(name, parameters)}"
            )
        elif isinstance(parameters[name].default, bool) and not isinstance(value, bool):
            problems.append(f"{_OWNER}.profiler_kwargs[{name!r}]={value!r}: must be True or False.")
    return problems
