# SPDX-License-Identifier: Apache-2.0
"""Results of the calibration, as tables in Markdown and as the file that the planner reads."""

import ast
import inspect
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from bench.planner.fit import Fit, row_weights, summary, values_at
from bench.planner.memory_score import Score
from bench.planner.ranking import ranking
from bench.planner.rows import Row
from nemo2.preflight.planner.constants import CALIBRATED, PRIORS, Constants
from nemo2.preflight.planner.error_band import band, job_kind

# "NeMo", "dgxc" and the like: who publishes with Megatron-Core and Transformer Engine.
_NVIDIA = ("NeMo", "NVIDIA", "Megatron", "arXiv 2104.04473", "arXiv 2205.05198")


def bands(rows: Sequence[Row], errors: np.ndarray) -> dict[str, list[float]]:
    """The band of each kind of job: the sixth and five sixths of measured over predicted speed, and how many they are. Rows of
    one project count as little each as in the fit."""
    kinds: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row, error, weight in zip(rows, errors.tolist(), row_weights(rows).tolist(), strict=True):
        kinds[job_kind(row.shape, row.job)].append((float(np.exp(-error)), weight))
    return {kind: [*_sixths(found), len(found)] for kind, found in sorted(kinds.items())}


def _sixths(found: Sequence[tuple[float, float]]) -> list[float]:
    values, weights = np.array(sorted(found)).T
    below = (np.cumsum(weights) - weights / 2) / weights.sum()
    return [round(float(np.interp(share, below, values)), 3) for share in (1 / 6, 5 / 6)]


def coverage_line(rows: Sequence[Row], errors: np.ndarray) -> str:
    """Share of measurements that lie in the band of other projects' errors. ``errors``: those with the row's project left out."""
    within = 0
    for name in {row.family for row in rows}:
        other = np.array([row.family != name for row in rows])
        found = bands([row for row, kept in zip(rows, other, strict=True) if kept], errors[other])
        for index in np.flatnonzero(~other).tolist():
            told = band(rows[index].shape, rows[index].job, found)
            within += told.low <= np.exp(-errors[index]) <= told.high
    return (
        f"The printed range should contain two thirds of the measurements. Ranges computed from all other projects contain "
        f"{within / len(rows):.0%} of a project's measurements."
    )


def write_calibration(fitted: Fit, rows: Sequence[Row], errors: np.ndarray, path: Path = CALIBRATED) -> None:
    """Constants, and the band of each kind of job, by errors with the row's project left out."""
    constants = {name: float(f"{value:.4g}") for name, value in values_at(fitted.at).items()}
    text = json.dumps({"constants": constants, "errors": bands(rows, errors)}, indent=2)
    path.write_text(text + "\n", encoding="utf-8")


def project_table(rows: Sequence[Row], by_source: Sequence[float], by_project: Sequence[float]) -> str:
    """A line for each project, and for groups of rows that cross them."""
    lines = [
        "| project | speeds | source left out: bias | error | within 15% | project left out: bias | error | within 15% |",
        "|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[str, Callable[[Row], bool]] = {
        name: lambda row, name=name: row.family == name for name in _by_size(row.family for row in rows)
    }
    groups |= {
        "**NVIDIA, dense models**": lambda row: is_nvidia(row) and not row.shape.experts,
        "**models with experts**": lambda row: bool(row.shape.experts),
        "**all**": lambda row: True,
    }
    for name, belongs in groups.items():
        chosen = [index for index, row in enumerate(rows) if belongs(row)]
        cells = [cell for errors in (by_source, by_project) for cell in _cells([errors[index] for index in chosen])]
        lines.append(f"| {name} | {len(chosen)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def source_table(rows: Sequence[Row], errors: Sequence[float]) -> str:
    """A line for each source, by errors of predictions that it was left out of."""
    grouped: Mapping[str, list[float]] = defaultdict(list)
    for row, error in zip(rows, errors, strict=True):
        grouped[row.source].append(error)
    lines = ["| source | speeds | bias | error | within 15% |", "|---|---|---|---|---|"]
    for name, found in sorted(grouped.items()):
        lines.append(f"| {name.replace('|', '/')} | {len(found)} | {' | '.join(_cells(found))} |")
    return "\n".join(lines)


def constants_table(fitted: Fit) -> str:
    """Every constant: its guess, the calibrated value, and the reason for the guess."""
    lines = ["| constant | guess | calibrated | meaning, and the reason for the guess |", "|---|---|---|---|"]
    why = reasons()
    for name, value in values_at(fitted.at).items():
        lines.append(f"| `{name}` | {PRIORS[name].value:g} | {value:.3g} | {why[name.partition('.')[0]]} |")
    return "\n".join(lines)


def reasons() -> dict[str, str]:
    """The text below each field of `Constants`."""
    [declared] = ast.parse(inspect.getsource(Constants)).body
    assert isinstance(declared, ast.ClassDef)
    return {
        field.target.id: " ".join(ast.literal_eval(text.value).split())
        for field, text in itertools.pairwise(declared.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr)
    }


def ranking_lines(rows: Sequence[Row], by_source: Sequence[float], by_project: Sequence[float]) -> str:
    """Share of pairs of layouts whose faster one the prediction names."""
    lines = [
        "| pairs of layouts | number | source left out: correct | every source weighted equally | project left out: correct | "
        "every source weighted equally |",
        "|---|---|---|---|---|---|",
    ]
    for apart in (0.05, 0.0):
        one, two = ranking(rows, by_source, apart=apart), ranking(rows, by_project, apart=apart)
        which = f"speeds at least {apart:.0%} apart" if apart else "all"
        lines.append(
            f"| {which} | {one.pairs:,} | {one.right:.1%} | {one.mean:.1%} | {two.right:.1%} | {two.mean:.1%} |"
        )
    return "\n".join(lines)


def trust_table(rows: Sequence[Row], by_project: Sequence[float], memory: Score) -> str:
    """A user's table: each prediction, the published runs that it was compared with, and how often it was right."""
    groups: dict[str, Callable[[Row], bool]] = {
        "speed, all jobs": lambda row: True,
        "speed, dense models, published by NVIDIA": lambda row: is_nvidia(row) and not row.shape.experts,
        "speed, models with experts": lambda row: bool(row.shape.experts),
    }
    lines = ["| prediction | compared with | result |", "|---|---|---|"]
    for name, belongs in groups.items():
        errors = [error for row, error in zip(rows, by_project, strict=True) if belongs(row)]
        _, size, near = summary(errors)
        lines.append(f"| {name} | {len(errors):,} published speeds | median error {size:.1%}, {near:.0%} within 15% |")
    pairs = ranking(rows, by_project)
    return "\n".join(
        [
            *lines,
            f"| the faster of two layouts | {pairs.pairs:,} published pairs, at least 5% apart | {pairs.right:.1%} correct |",
            f"| whether a job fits, by formula | {memory.verdicts:,} published runs | {memory.right:.0%} correct |",
        ]
    )


def is_nvidia(row: Row) -> bool:
    """Whether NVIDIA published it."""
    return any(name in row.source for name in _NVIDIA)


def replace_between(path: Path, name: str, text: str) -> None:
    """Put ``text`` between the comments ``<!-- name -->`` and ``<!-- /name -->`` of a page.

    Raises:
        ValueError: the page does not have them.
    """
    page = path.read_text(encoding="utf-8")
    before, start, rest = page.partition(f"<!-- {name} -->")
    _, end, after = rest.partition(f"<!-- /{name} -->")
    if not (start and end):
        raise ValueError(f"{path} has no place for {name}.")
    path.write_text(f"{before}{start}\n{text}\n{end}{after}", encoding="utf-8")


def _cells(errors: Sequence[float]) -> list[str]:
    median, size, near = summary(errors)
    return [f"{median:+.1%}", f"{size:.1%}", f"{near:.0%}"]


def _by_size(names: Iterable[str]) -> list[str]:
    counted: dict[str, int] = defaultdict(int)
    for name in names:
        counted[name] += 1
    return sorted(counted, key=lambda name: (-counted[name], name))
