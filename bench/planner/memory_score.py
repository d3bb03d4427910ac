# SPDX-License-Identifier: Apache-2.0
"""Score of the memory formula on published runs: its verdicts and its peaks."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from bench.planner.memory_rows import MemoryRow
from nemo2.preflight.planner.memory import GUESSED, MemoryConstants, predict_memory


class Score(NamedTuple):
    """Verdicts and peaks of some runs; shares of the verdicts that were right, by what happened."""

    verdicts: int
    right: float
    oom_seen: float
    fits_seen: float
    peaks: int
    median_peak: float


def fits(row: MemoryRow, c: MemoryConstants = GUESSED) -> bool:
    """Whether the formula says that the run fits its GPU."""
    return predict_memory(row.shape, row.job, c).used <= row.job.gpu.memory


def peak_error(row: MemoryRow, c: MemoryConstants = GUESSED) -> float:
    """Predicted over printed peak, less 1."""
    assert row.peak is not None
    memory = predict_memory(row.shape, row.job, c, stage=row.stage)
    return (memory.used if row.used else memory.allocated) / 1e9 / row.peak - 1


def score(rows: Sequence[MemoryRow], c: MemoryConstants = GUESSED) -> Score:
    said = [(row.oom, not fits(row, c)) for row in rows]
    # A run that ran out of memory has no peak.
    errors = sorted(abs(peak_error(row, c)) for row in rows if row.peak and not row.oom)

    def share(kind: bool) -> float:
        found = [oom == told for oom, told in said if oom is kind]
        return sum(found) / len(found) if found else float("nan")

    right = sum(oom == told for oom, told in said) / len(said)
    return Score(
        len(said), right, share(True), share(False), len(errors), errors[len(errors) // 2] if errors else float("nan")
    )


def table(rows: Sequence[MemoryRow], c: MemoryConstants = GUESSED) -> str:
    """Markdown: verdicts and peaks of each project, and of all."""
    grouped: dict[str, list[MemoryRow]] = defaultdict(list)
    for row in rows:
        grouped[row.family].append(row)
    lines = [
        "| project | runs | correct | correct, ran out of memory | correct, fit | peaks | median error of peaks |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in [*sorted(grouped.items(), key=lambda item: -len(item[1])), ("all", list(rows))]:
        s = score(found, c)
        cells = [f"{value:.0%}" if value == value else "" for value in (s.right, s.oom_seen, s.fits_seen)]
        median = f"{s.median_peak:.1%}" if s.peaks else ""
        lines.append(f"| {name} | {s.verdicts} | {cells[0]} | {cells[1]} | {cells[2]} | {s.peaks or ''} | {median} |")
    return "\n".join(lines)
