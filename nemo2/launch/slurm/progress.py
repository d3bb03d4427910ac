# SPDX-License-Identifier: Apache-2.0
"""Reads a submitted run's progress through a shell from the files in its directory, wherever that is."""

import contextlib
from dataclasses import dataclass
from shlex import quote
from statistics import median
from typing import Optional

import yaml

from nemo2.launch.slurm.shell import Shell
from nemo2.training.run_dir.effective import planned_steps
from nemo2.training.run_dir.records import METRICS_FILE, parse_record, series

_LINES = 100


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A run's progress. None: the run hasn't written the value yet."""

    steps: int
    """The number of finished steps among those that are logged."""
    planned_steps: Optional[int]
    loss: Optional[float]
    """The loss of the last logged step."""
    val_loss: Optional[float]
    """The loss of the last validation."""
    step_seconds: Optional[float]
    """The median of the last logged steps."""
    tokens_per_second: Optional[float]

    @property
    def seconds_left(self) -> Optional[float]:
        """The time until the last step at the current speed, without validations, saves and waiting in the queue."""
        if self.planned_steps is None or self.step_seconds is None:
            return None
        return max(0, self.planned_steps - self.steps) * self.step_seconds

    def __str__(self) -> str:
        of = "" if self.planned_steps is None else f" of {self.planned_steps:,}"
        parts = [f"step {self.steps:,}{of}"]
        parts += [
            f"{name} {value:.4g}"
            for name, value in (("loss", self.loss), ("val loss", self.val_loss))
            if value is not None
        ]
        if self.step_seconds is not None:
            parts.append(f"{self.step_seconds:.3g} s per step")
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:,.0f} tokens per second")
        if self.seconds_left:
            parts.append(f"{span(self.seconds_left)} left")
        return ", ".join(parts)


def progress(shell: Shell, run_directory: str) -> Optional[Progress]:
    """The progress of the run in this directory. None: it has not logged a step yet."""
    _, lines, _ = shell.run(f"tail -n {_LINES} {quote(run_directory)}/{METRICS_FILE} 2>/dev/null")
    records = []
    for line in lines.splitlines():
        with contextlib.suppress(ValueError, TypeError):  # the last line is being written
            records.append(parse_record(line))
    done = [record["step"] for record in records if isinstance(record.get("step"), int)]
    if not done:
        return None

    def last(name: str) -> Optional[float]:
        return next((value for _, value in reversed(series(records, name))), None)

    times = [seconds for _, seconds in series(records, "train_step_timing")]
    return Progress(
        steps=max(done) + 1,
        planned_steps=_planned(shell, run_directory),
        loss=last("reduced_train_loss"),
        val_loss=last("val_loss"),
        step_seconds=median(times) if times else None,
        tokens_per_second=last("tokens_per_second"),
    )


def span(seconds: float) -> str:
    """Seconds in a readable form: 50 s, 12 min, 3 h 20 min, 4 d 7 h."""
    minutes, hours = round(seconds / 60), int(seconds // 3600)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 90:
        return f"{minutes} min"
    if hours < 48:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{hours // 24} d {hours % 24} h"


def _planned(shell: Shell, run_directory: str) -> Optional[int]:
    _, text, _ = shell.run(f"cat {quote(run_directory)}/effective_config.yaml 2>/dev/null")
    try:
        return planned_steps(yaml.safe_load(text))
    except yaml.YAMLError:
        return None
