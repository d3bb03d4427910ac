# SPDX-License-Identifier: Apache-2.0
"""The text line of a logged step, which a rank writes and a launcher parses.

The format is NeMo's, which scripts parse::

    Training epoch 0, iteration 0/29 | lr: 5.988e-07 | global_batch_size: 256 | global_step: 0 | reduced_train_loss: 9.1

Formatting and parsing are both here, so that they can't diverge. Imports only the standard library, because the
launching process reads these lines without torch.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ORDER = (
    "lr",
    "global_batch_size",
    "global_step",
    "reduced_train_loss",
    "val_loss",
    "test_loss",
    "grad_norm",
    "consumed_samples",
    "train_step_timing in s",
    "tokens_per_second",
    "tflops_per_gpu",
)
"""Metrics that are printed first, in this order; every other metric follows by name."""

_LINE = re.compile(
    r"^(?P<stage>Training|Validation|Test) epoch (?P<epoch>\d+), iteration (?P<step>\d+)/(?P<last>\d+|\?)"
)


@dataclass(frozen=True, kw_only=True)
class ProgressLine:
    """A parsed line. ``step`` and ``last_step`` count from zero. ``last_step`` is None for a run without an end."""

    stage: str
    epoch: int
    step: int
    last_step: int | None
    metrics: dict[str, float]


def format_record(record: Mapping[str, Any], planned_steps: int | None) -> str:
    """A record of ``metrics.jsonl`` as a line: ``step 3 of 12 | lr: 1e-4 | reduced_train_loss: 7.6``."""
    of = "" if planned_steps is None else f" of {planned_steps:,}"
    where = f"step {record['step'] + 1:,}{of}" if isinstance(record.get("step"), int) else "no step"
    numbers = {k: v for k, v in record.items() if k != "step" and isinstance(v, int | float)}
    return " | ".join([where, *_in_order(numbers)])


def format_line(stage: str, *, epoch: int, step: int, last_step: int | None, metrics: Mapping[str, float]) -> str:
    """The line for ``metrics``; ``stage`` is "Training", "Validation" or "Test"."""
    last = "?" if last_step is None else last_step
    return " | ".join([f"{stage} epoch {epoch}, iteration {step}/{last}", *_in_order(metrics)])


def _in_order(metrics: Mapping[str, float]) -> list[str]:
    known = [name for name in ORDER if name in metrics]
    names = known + sorted(name for name in metrics if name not in ORDER)
    return [f"{name}: {format_number(metrics[name])}" for name in names]


def parse_line(line: str) -> ProgressLine | None:
    """The inverse of `format_line`; None for any other text."""
    line = line.rstrip("\n")
    match = _LINE.match(line)
    if match is None:
        return None
    metrics = {}
    for part in line[match.end() :].split(" | "):
        name, separator, value = part.strip(" |").rpartition(": ")
        if not separator:
            continue
        try:
            metrics[name] = float(value)
        except ValueError:
            continue
    last = match["last"]
    return ProgressLine(
        stage=match["stage"],
        epoch=int(match["epoch"]),
        step=int(match["step"]),
        last_step=None if last == "?" else int(last),
        metrics=metrics,
    )


def format_number(value: float) -> str:
    """Four significant digits; whole numbers in full; ``nan`` and ``inf`` as such."""
    value = float(value)
    if math.isfinite(value) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    return f"{value:.4}"
