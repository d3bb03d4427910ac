# SPDX-License-Identifier: Apache-2.0
"""Compares runs: their results, their curves in one chart, and the differences of their recipes."""

import math
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Optional

from nemo2.report.pictures.page import figures, note, page, section, table
from nemo2.training.run_dir.records import METRICS_FILE, median_of, series
from nemo2.training.run_dir.run_folder import TRAINING_LOSS, VALIDATION_LOSS, RunFolder, curves

_CURVES = (
    (TRAINING_LOSS, "Training loss"),
    (VALIDATION_LOSS, "Validation loss"),
    ("train_step_timing", "Seconds per step"),
    ("tokens_per_second", "Tokens per second"),
    ("grad_norm", "Gradient norm"),
)
_OF_THE_PLACE = ("log.name", "log.log_dir", "log.tensorboard.name", "log.wandb.name")
"""Settings in which any two runs differ."""


def summary(run: RunFolder) -> dict[str, Any]:
    """The results of a run. None: not logged.

    ``start`` is the name of the run directory, by default the run's start time. ``written`` is the time of the last log
    in seconds since the epoch. ``val_loss`` is the lowest validation loss. ``step_s`` and ``tokens_per_second`` are
    medians.
    """
    records = run.records
    losses, validation = series(records, TRAINING_LOSS), series(records, VALIDATION_LOSS)
    metrics = run / METRICS_FILE
    return {
        "name": run.absolute().parent.name,
        "start": run.name,
        "steps": run.steps,
        "planned_steps": run.planned_steps,
        "loss": losses[-1][1] if losses else None,
        "val_loss": min((value for _, value in validation if math.isfinite(value)), default=None),
        "step_s": median_of(records, "train_step_timing"),
        "tokens_per_second": median_of(records, "tokens_per_second"),
        "written": metrics.stat().st_mtime if metrics.is_file() else None,
        "folder": str(run),
    }


def labels(runs: Sequence[RunFolder]) -> list[str]:
    """A short, unique name for each run: the run's name, with its start time if needed, or its path."""
    names = [run.absolute().parent.name for run in runs]
    if len(set(names)) < len(names):
        names = [f"{run.absolute().parent.name}/{run.name}" for run in runs]
    return names if len(set(names)) == len(names) else [str(run) for run in runs]


def losses_at_one_step(runs: Sequence[RunFolder]) -> Optional[tuple[int, list[float]]]:
    """The last step for which all runs logged a training loss, and each run's loss there. None: there is no such
    step."""
    by_run = [dict(series(run.records, TRAINING_LOSS)) for run in runs]
    common = set(by_run[0]).intersection(*by_run[1:])
    return None if not common else (max(common), [losses[max(common)] for losses in by_run])


def differences(recipes: Sequence[Any]) -> list[tuple[str, list[Any]]]:
    """Each path at which the effective values of recipes differ, with the value of each recipe. Names and folders of
    runs are left out."""
    from nemo2.config import diff, flatten
    from nemo2.config.show import NOT_SET

    paths = dict.fromkeys(change.path for other in recipes[1:] for change in diff(recipes[0], other))
    flat = [flatten(recipe, defaults=True) for recipe in recipes]
    return [(path, [one.get(path, NOT_SET) for one in flat]) for path in paths if path not in _OF_THE_PLACE]


def comparison_page(runs: Sequence[RunFolder], changes: Sequence[tuple[str, list[Any]]], *, without: str = "") -> str:
    """The page as text.

    Args:
        changes: `differences` of their recipes.
        without: The reason if the recipes are unreadable.
    """
    from nemo2.config.show import format_value

    names = labels(runs)
    rows = [[name, *row] for name, row in zip(names, rows_of([summary(run) for run in runs]), strict=True)]
    charts = []
    for metric, title in _CURVES:
        if any(series(run.records, metric) for run in runs):
            lines = [(name, run, metric) for name, run in zip(names, runs, strict=True)]
            wide = metric == TRAINING_LOSS
            charts.append((title, curves(lines, title=title, width=760 if wide else 520), wide))
    settings = [[path, *map(format_value, values)] for path, values in changes]
    differ = table(["setting", *names], settings) if settings else note(without or "The recipes are identical.")
    return page(
        "Runs compared",
        section("Figures", table(["run", *COLUMNS], rows)),
        section("Curves", figures(charts)),
        section("Settings that differ", differ),
        subtitle=", ".join(str(run.absolute()) for run in runs),
    )


COLUMNS = ("steps", "loss", "best val loss", "s / step", "tokens / s", "last logged")
FIRST_TO_GO = ("best val loss", "last logged", "s / step", "tokens / s")
"""The columns that a narrow terminal leaves out, in this order."""


def rows_of(summaries: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A row of `COLUMNS` for each summary."""
    return [
        [
            f"{one['steps']:,} of {one['planned_steps']:,}" if one["planned_steps"] else f"{one['steps']:,}",
            _number(one["loss"], "#.4g"),
            _number(one["val_loss"], "#.4g"),
            _number(one["step_s"], "#.3g"),
            _number(one["tokens_per_second"], ",.0f"),
            "-" if one["written"] is None else f"{datetime.fromtimestamp(one['written']):%Y-%m-%d %H:%M}",
        ]
        for one in summaries
    ]


def _number(value: Optional[float], form: str) -> str:
    """``value`` in the format ``form``. Trailing zeros stay, so that the numbers of a column align."""
    return "-" if value is None else format(value, form).removesuffix(".")
