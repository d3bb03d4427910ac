# SPDX-License-Identifier: Apache-2.0
"""Reads and truncates ``metrics.jsonl`` without Lightning, for reports, notebooks and the launching process."""

import contextlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from nemo2.base.errors import DataError
from nemo2.base.files import append, replacing

RECIPE_FILE = "recipe.json"
RECIPE_VARIABLE = "NEMO2_RECIPE_FILE"
"""The variable that names a file with the run's recipe as JSON. The launcher sets it, and the file is copied into
the run directory."""
METRICS_FILE = "metrics.jsonl"
SET_ASIDE_FILE = "metrics.redone.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
"""Evaluations of the run's saved checkpoints, in records like those of ``metrics.jsonl``."""
EVALUATION = "evaluation/"
"""The prefix of the names of evaluations on texts and tasks."""
RESUMED_FILE = "resumed.jsonl"
"""The steps at which the run was stopped and resumed, a record for each time."""
CHANGES_FILE = "changes.json"
"""The differences between the recipe and the checkpoint that the last resume found."""
EFFECTIVE_FILE = "effective_config.yaml"
ENVIRONMENT_FILE = "environment.json"
REPORT_FILE = "report.html"
CURVE_FILE = "loss_curve.svg"
OWN_FILES = (
    RECIPE_FILE, METRICS_FILE, SET_ASIDE_FILE, EVALUATIONS_FILE, RESUMED_FILE, CHANGES_FILE, EFFECTIVE_FILE,
    ENVIRONMENT_FILE, REPORT_FILE, CURVE_FILE,
)  # fmt: skip
"""The names of the files that a run writes into its directory, beside its logs."""
_NONFINITE = "nonfinite"


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The objects of a ``metrics.jsonl``, or of a run directory's, in the order in which they were written.

    Values that were not finite return as ``float("nan")`` and ``float("inf")``. An incomplete last line, of a run that
    is writing or was killed, is left out.

    Args:
        path: A ``metrics.jsonl``, or a run directory.

    Raises:
        DataError: there is no such file, or a line in the middle isn't JSON.
    """
    path = _metrics_path(path)
    if not path.is_file():
        raise DataError(f"{path} does not exist; a run writes it with its first logged step.")
    records = []
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror or error}.") from error
    lines = text.split("\n")
    complete, rest = lines[:-1], lines[-1]
    for number, line in enumerate(complete, start=1):
        if not line.strip():
            continue
        try:
            records.append(parse_record(line))
        except (ValueError, TypeError) as error:
            raise DataError(
                f"{path}:{number} is not a JSON object ({error}); remove the line to read the rest."
            ) from error
    if rest.strip():
        with contextlib.suppress(ValueError, TypeError):
            records.append(parse_record(rest))
    return records


def to_line(record: Mapping[str, Any]) -> str:
    """A record as a line for `read_metrics`. JSON has no NaN, so a number that isn't finite becomes ``null``, with its
    kind under ``nonfinite``. A metric of that name moves there too."""
    moved = {
        name: str(float(value))
        for name, value in record.items()
        if isinstance(value, float) and not math.isfinite(value) or name == _NONFINITE
    }
    if not moved:
        return json.dumps(record) + "\n"
    return json.dumps({**record, **dict.fromkeys(moved), _NONFINITE: moved}) + "\n"


def series(records: list[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    """``(step, value)`` of every record with ``name``, by step. If a step has several records, the last one counts."""
    values = {}
    for record in records:
        if name in record and "step" in record and isinstance(record[name], int | float):
            values[record["step"]] = float(record[name])
    return sorted(values.items())


def median_of(records: list[dict[str, Any]], name: str) -> float | None:
    """The median of the finite values under ``name``. None: there are none."""
    values = [value for _, value in series(records, name) if math.isfinite(value)]
    return median(values) if values else None


def by_step_done(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Points of `series` over the number of finished steps, as progress lines and charts count them: from one."""
    return [(step + 1, value) for step, value in points]


def add_evaluation(run_dir: Path, *, step: int, checkpoint: str, figures: Mapping[str, float]) -> None:
    """Append a checkpoint's evaluation to its run's file. ``step`` counts from zero, as in ``metrics.jsonl``."""
    append(run_dir / EVALUATIONS_FILE, to_line({"step": step, "checkpoint": checkpoint, **figures}))


@dataclass(frozen=True)
class Resumption:
    """A resumption of a run. Both fields count finished steps."""

    step: int
    """The step of the checkpoint from which the run resumed."""
    stopped_at: int
    """The last step that was logged before the resumption. Above ``step`` if the run repeats steps."""

    def __str__(self) -> str:
        if self.stopped_at <= self.step:
            return f"stopped and resumed at step {self.step:,}"
        return f"stopped at step {self.stopped_at:,}, resumed at {self.step:,}"


def note_resumption(run_dir: Path, *, finished_steps: int) -> None:
    """Record in ``resumed.jsonl`` that the run resumes after ``finished_steps`` steps.

    Does nothing if the run has logged no step or starts from step 0.
    """
    try:
        logged = max((record["step"] for record in read_metrics(run_dir) if "step" in record), default=-1)
    except DataError:  # missing or damaged: charts then lack one mark
        return
    if logged >= 0 and finished_steps > 0:
        append(run_dir / RESUMED_FILE, to_line({"step": finished_steps, "stopped_at": logged + 1}))


def resumptions(run_dir: Path) -> list[Resumption]:
    """The resumptions of a run, in order. Empty if the run was never resumed or its record is unreadable."""
    try:
        records = read_metrics(run_dir / RESUMED_FILE)
        return [Resumption(int(record["step"]), int(record["stopped_at"])) for record in records]
    except (DataError, KeyError, TypeError, ValueError):
        return []


def truncate_metrics(path: str | os.PathLike[str], *, finished_steps: int) -> int:
    """Drop the lines of steps that are not among the first ``finished_steps``. Returns the number of dropped lines.

    Dropped lines are appended to ``metrics.redone.jsonl`` beside the file, so that repeated steps can be compared. The
    file is replaced in one rename. An incomplete last line is deleted.
    """
    path = _metrics_path(path)
    if not path.is_file():
        return 0
    remaining, dropped = [], []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        if not line.strip():
            continue
        try:
            step = json.loads(line).get("step")
        except (ValueError, AttributeError):
            continue
        (remaining if step is None or step < finished_steps else dropped).append(line)
    if dropped:
        append(path.with_name(SET_ASIDE_FILE), "".join(line + "\n" for line in dropped))
    write_text(path, "".join(line + "\n" for line in remaining))
    return len(dropped)


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """Write a file atomically: a reader sees the old or the new file."""
    path = Path(path)
    with replacing(path, by_user=False) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


def _metrics_path(path: str | os.PathLike[str]) -> Path:
    path = Path(path)
    return path / METRICS_FILE if path.is_dir() else path


def parse_record(line: str) -> dict[str, Any]:
    """The record of a line that `to_line` made.

    Raises:
        ValueError: it isn't a JSON object.
    """
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError(f"a {type(record).__name__}")
    moved = record.pop(_NONFINITE, {})
    # An earlier version wrote a metric of this name as a plain number.
    values = moved if isinstance(moved, dict) else {_NONFINITE: moved}
    return record | {name: float(value) for name, value in values.items()}
