# SPDX-License-Identifier: Apache-2.0
"""Writes ``report.html``: a self-contained page about a run with curves, settings, checkpoints and environment.

The page is made from the files of the run directory only, so it can be made again at any time, also during the run. It
loads nothing from a network and runs no script.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Optional

from nemo2.base.advice import advice
from nemo2.base.counts import byte_size, short_count
from nemo2.base.errors import CheckpointError, DataError, RuntimeFault
from nemo2.base.files import write_file
from nemo2.checkpoint.directory import finished
from nemo2.checkpoint.foreign_files import read_json, read_yaml
from nemo2.mcore.parallel.layout import LAYOUT_FIELDS
from nemo2.report.pictures.charts import WIDTH, Mark, Series, line_chart
from nemo2.report.pictures.page import cards, details, figures, fitting, listing, note, page, pairs, section, table
from nemo2.report.pictures.svg import standalone
from nemo2.training.run_dir.effective import planned_steps
from nemo2.training.run_dir.records import (
    CHANGES_FILE,
    CURVE_FILE,
    EFFECTIVE_FILE,
    ENVIRONMENT_FILE,
    EVALUATION,
    EVALUATIONS_FILE,
    METRICS_FILE,
    RECIPE_FILE,
    REPORT_FILE,
    by_step_done,
    median_of,
    read_metrics,
    resumptions,
    series,
    write_text,
)


def write_report(run_dir: str | os.PathLike[str], output: Optional[Path] = None) -> Path:
    """Write ``report.html`` and ``loss_curve.svg``. Returns the page's path.

    Args:
        run_dir: The run directory.
        output: Write only the page, to this file; the run directory may be somebody else's. None: to the run directory.

    Raises:
        DataError: the directory doesn't exist or has no ``metrics.jsonl``.
        RuntimeFault: the system refuses to write, as a folder that is read-only does.
    """
    directory = Path(run_dir)
    if not directory.is_dir():
        raise DataError(f"{directory} is not a directory. Give the run directory, which contains {METRICS_FILE}.")
    file = directory / EVALUATIONS_FILE
    records = [*read_metrics(directory), *(read_metrics(file) if file.is_file() else [])]
    if output is not None:
        return write_file(output, render_report(directory, records))
    curve = line_chart("loss", _loss_series(records), y_label="loss", marks=resumed_marks(directory))
    contents = render_report(directory, records)
    try:
        write_text(directory / CURVE_FILE, standalone(curve))
        return write_text(directory / REPORT_FILE, contents)
    except OSError as error:
        fix = advice("name another file with --output", "name another file as output")
        raise RuntimeFault(f"{directory} can't be written ({error.strerror or error}): {fix}.") from error


def render_report(directory: Path, records: list[dict[str, Any]]) -> str:
    """The page as text."""
    effective = read_mapping(directory / EFFECTIVE_FILE, read_yaml)
    environment = read_mapping(directory / ENVIRONMENT_FILE, read_json)
    files = [(EFFECTIVE_FILE, "Effective configuration"), (RECIPE_FILE, "Recipe")]
    shown = [
        details(title, file, (directory / file).read_text(encoding="utf-8", errors="replace"))
        for file, title in files
        if (directory / file).is_file()
    ]
    # What the last resume found, the most serious first.
    changes = read_mapping(directory / CHANGES_FILE, read_json)
    kinds = (("unfit", "doesn't fit the checkpoint"), ("result", "changes the result"), ("harmless", "harmless"))
    lines = [f"{words}: {line}" for kind, words in kinds for line in changes.get(kind) or ()]
    return page(
        f"{directory.absolute().parent.name} · {directory.absolute().name}",
        _cards(records, effective, finished_steps(directory, records)),
        section("Curves", _charts(records, resumed_marks(directory))),
        section("Settings", _settings(effective)),
        *([section("Recipe changes since the checkpoint", listing(lines))] if lines else []),
        section("Checkpoints", _checkpoints(directory / "checkpoints")),
        section("Environment", _environment(environment), *shown),
        subtitle=str(directory.absolute()),
    )


def resumed_marks(run_dir: Path) -> list[Mark]:
    """The marks of a run's resumptions in its charts. Repeated steps are shaded."""
    return [
        Mark(x=one.step, until=one.stopped_at if one.stopped_at > one.step else None, words=str(one))
        for one in resumptions(run_dir)
    ]


def _loss_series(records: list[dict[str, Any]]) -> list[Series]:
    train = Series(name="train", points=by_step_done(series(records, "reduced_train_loss")), smooth=True)
    validation = Series(name="val", points=by_step_done(series(records, "val_loss")), markers=True)
    return [train, validation]


def _charts(records: list[dict[str, Any]], marks: list[Mark]) -> str:
    loss = partial(line_chart, "loss over steps", _loss_series(records), y_label="loss", marks=marks)
    charts = [("Loss", _fitting(loss, WIDTH), True)]
    for name, title, unit in (
        ("lr", "Learning rate", "learning rate"),
        ("grad_norm", "Gradient norm", "norm"),
        ("train_step_timing", "Step time", "seconds"),
        ("tokens_per_second", "Throughput", "tokens / s"),
        ("tflops_per_gpu", "Model TFLOP/s per device", "TFLOP/s"),
    ):
        points = by_step_done(series(records, name))
        if points:
            line = Series(name="", points=points, smooth=name != "lr")
            charts.append((title, _fitting(partial(line_chart, title, [line], y_label=unit, marks=marks)), False))
    return figures([*charts, *_evaluation_charts(records)])


def _evaluation_charts(records: list[dict[str, Any]]) -> Iterator[tuple[str, str, bool]]:
    """A chart for each metric, with a line for each text or task."""
    names = sorted({name for record in records for name in record if name.startswith(EVALUATION)})
    metrics = {name.rpartition("/")[2] for name in names}
    for metric in sorted(metrics):
        lines = [
            Series(
                name=name.removeprefix(EVALUATION).rpartition("/")[0],
                points=by_step_done(series(records, name)),
                markers=True,
            )
            for name in names
            if name.rpartition("/")[2] == metric
        ]
        title = metric.replace("_", " ")
        yield f"Evaluation: {title}", _fitting(partial(line_chart, f"{title} over steps", lines, y_label=title)), False


def _fitting(chart: Callable[..., str], width: int = 520) -> str:
    return fitting(lambda pixels: chart(width=pixels), width)


def finished_steps(directory: Path, records: list[dict[str, Any]]) -> int:
    """The number of training steps that a run has finished, by its records and its checkpoints."""
    losses = series(records, "reduced_train_loss")
    saved = [manifest.step for _, manifest in finished(directory / "checkpoints")]
    return max([losses[-1][0] + 1 if losses else 0, *saved])


def _cards(records: list[dict[str, Any]], effective: Mapping[str, Any], done: int) -> str:
    losses = series(records, "reduced_train_loss")
    validation = series(records, "val_loss")
    samples = series(records, "consumed_samples")
    sequence = (effective.get("data") or {}).get("seq_length")
    planned = planned_steps(effective)
    shown = []
    if losses:
        of = f"of {planned:,}" if planned is not None else "done"
        shown.append((f"{done:,}", f"steps {of}"))
        shown.append((f"{losses[-1][1]:.4g}", f"training loss, from {losses[0][1]:.4g}"))
    if validation:
        step, best = min(validation, key=lambda point: (not math.isfinite(point[1]), point[1]))
        shown.append((f"{best:.4g}", f"best validation loss, step {step + 1:,}"))
    if (seconds := median_of(records, "train_step_timing")) is not None:
        shown.append((f"{seconds:.3g} s", "per step, median"))
    if (speed := median_of(records, "tokens_per_second")) is not None:
        shown.append((short_count(speed), "tokens per second, median"))
    if samples:
        consumed = samples[-1][1]
        tokens = f", {short_count(consumed * sequence)} tokens" if isinstance(sequence, int) else ""
        shown.append((short_count(consumed), f"samples{tokens}"))
    return cards(shown)


def _settings(effective: Mapping[str, Any]) -> str:
    if not effective:
        return note("effective_config.yaml is written at the first step.")
    chosen = {
        "model": ("class", "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
        "data": ("class", "seq_length", "micro_batch_size", "global_batch_size"),
        "strategy": ("class", *LAYOUT_FIELDS.values()),
        "trainer": ("world_size", "num_nodes", "max_steps", "val_check_interval", "log_every_n_steps"),
        "precision": ("class", "precision", "fp8"),
        "optimizer": ("optimizer", "lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "clip_grad"),
        "lr_scheduler": ("class", "max_steps", "warmup_steps", "constant_steps", "min_lr"),
    }
    tables = []
    for part, names in chosen.items():
        values = effective.get(part) or {}
        rows = [(name, _text(values[name])) for name in names if values.get(name) is not None]
        if rows:
            tables.append((part, rows))
    return pairs(tables)


def _checkpoints(directory: Path) -> str:
    rows = [
        (
            path.name,
            manifest.step,
            manifest.consumed_samples,
            byte_size(sum(manifest.files.values())),
            f"{datetime.fromtimestamp(manifest.saved_at):%Y-%m-%d %H:%M:%S}",
        )
        for path, manifest in finished(directory)
    ]
    return table(("name", "steps", "samples", "size", "written"), rows) if rows else note("No finished checkpoint.")


def _environment(environment: Mapping[str, Any]) -> str:
    if not environment:
        return note("environment.json is missing.")
    git = environment.get("git")
    rows = [
        ("command", " ".join(environment.get("command_line") or [])),
        ("host", environment.get("host")),
        ("platform", environment.get("platform")),
        ("devices", ", ".join(dict.fromkeys(environment.get("devices") or []))),
        ("world size", environment.get("world_size")),
        (
            "git",
            f"{git['commit'][:12]} ({git['branch']}{', uncommitted changes' if git['dirty'] else ''})" if git else None,
        ),
    ]
    versions = [(name, value) for name, value in (environment.get("versions") or {}).items() if value]
    return pairs([("", [(name, value) for name, value in rows if value not in (None, "")]), ("", versions)])


def _text(value: Any) -> str:
    return value.rsplit(".", 1)[-1] if isinstance(value, str) and value.startswith("nemo2.") else str(value)


def read_mapping(path: Path, read: Callable[[Path], Any]) -> dict[str, Any]:
    """The contents of a file as a mapping. {}: the file is missing, incomplete or of another kind."""
    try:
        loaded = read(path)
    except CheckpointError:
        return {}
    return loaded if isinstance(loaded, dict) else {}
