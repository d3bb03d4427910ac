# SPDX-License-Identifier: Apache-2.0
"""The timeline of computation and communication of a run's ranks as a page, and the hidden fractions as a table."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo2.base.columns import columns
from nemo2.base.errors import DataError
from nemo2.report.pictures.page import figure, page, paragraph, section, table
from nemo2.report.pictures.svg import COLOURS, Canvas, legend, nice_ticks, tick_text
from nemo2.report.trace.chrome import read_trace
from nemo2.report.trace.events import COMPUTE, KINDS, RankTrace, Span, union

TRACES = "traces"
"""The folder in a run directory to which the profiler callback writes one ``rank-N.json`` per rank."""
PAGE = "overlap.html"
_FILLS = dict(zip((COMPUTE, *KINDS), COLOURS, strict=True))
_LEFT, _WIDTH, _LANE = 92, 1040, 17
_MOST = 1500


def traces_of(directory: Path) -> list[RankTrace]:
    """The traces of a run directory, or of a folder of trace files, by rank.

    Raises:
        DataError: there are no traces, or a trace is damaged.
    """
    folder = directory / TRACES if (directory / TRACES).is_dir() else directory
    names = {file: re.fullmatch(r"rank-(\d+)\.json(\.gz)?", file.name) for file in folder.glob("rank-*")}
    files = {int(name[1]): file for file, name in names.items() if name is not None}
    if not files:
        raise DataError(
            f"{directory} has no traces. Train with PytorchProfilerCallback(start_step=5, end_step=7), which writes "
            f"{TRACES}/rank-N.json into the run directory."
        )
    return [read_trace(file, rank=rank) for rank, file in sorted(files.items())]


def rows(traces: Sequence[RankTrace]) -> list[dict[str, Any]]:
    """A row per rank and kind of communication: count, bytes, time, and the fraction hidden behind computation."""
    return [
        {
            "rank": trace.rank,
            "kind": one.kind,
            "count": one.count,
            "bytes": one.size_bytes,
            "milliseconds": one.total / 1000,
            "hidden_milliseconds": one.hidden / 1000,
            "hidden_fraction": one.fraction,
        }
        for trace in traces
        for one in trace.hidden()
    ]


def render(traces: Sequence[RankTrace], *, title: str) -> str:
    """The page as text."""
    cells = _cells(traces)
    how = paragraph(
        "Communication is hidden while the rank computes. On CPU ranks, communication lasts from the call to its end, "
        "including the wait for other ranks. On GPUs, it lasts as long as NCCL's kernels run."
    )
    pictures = [figure(draw(trace).render(), f"Rank {trace.rank}") for trace in traces]
    shown = table(_HEAD, cells) if cells else paragraph("No communication was recorded.")
    return page(title, section("Hidden communication", shown, how), section("Timelines", *pictures))


def draw(trace: RankTrace) -> Canvas:
    """A timeline with a lane for computation and for each kind of communication."""
    kinds = [COMPUTE, *(kind for kind in KINDS if trace.of(kind))]
    top = 34
    bottom = top + len(kinds) * (_LANE + 6)
    shares = {one.kind: one.fraction for one in trace.hidden()}
    summary = ", ".join(f"{KINDS[kind]} {share:.0%} hidden" for kind, share in shares.items())
    canvas = Canvas(_WIDTH, bottom + 34, title=f"rank {trace.rank}: {summary or 'computation only'}")
    legend(canvas, 8, 16, [(_FILLS[kind], _label(kind, shares)) for kind in kinds])
    across = (_WIDTH - _LEFT - 12) / max(trace.end - trace.start, 1e-9)
    for tick in nice_ticks(0, (trace.end - trace.start) / 1000, count=9):
        x = _LEFT + tick * 1000 * across
        if x <= _WIDTH - 10:
            canvas.line(x, top, x, bottom)
            canvas.text(x, bottom + 14, tick_text(tick), anchor="middle", size=11)
    canvas.text(_LEFT - 8, bottom + 14, "ms", anchor="end", size=11)
    for lane, kind in enumerate(kinds):
        y = top + lane * (_LANE + 6)
        canvas.text(_LEFT - 8, y + 13, kind.replace("_", " "), "ink", anchor="end")
        for span in _thinned(trace.of(kind), 1 / across):
            x, width = _LEFT + (span.start - trace.start) * across, (span.end - span.start) * across
            milliseconds = (span.end - span.start) / 1000
            size = f", {span.size_bytes:,} bytes" if span.size_bytes else ""
            canvas.rect(x, y, max(width, 0.7), _LANE, _FILLS[kind], tip=f"{span.name}: {milliseconds:.3f} ms{size}")
    return canvas


def text(traces: Sequence[RankTrace]) -> str:
    """The hidden fractions as a text table."""
    return "\n".join(columns(_cells(traces), head=_HEAD, right=(0, *range(2, len(_HEAD)))))


_HEAD = ("rank", "communication", "times", "bytes", "ms", "ms hidden", "hidden")


def _cells(traces: Sequence[RankTrace]) -> list[tuple[Any, ...]]:
    return [
        (row["rank"], KINDS[row["kind"]], row["count"], f"{row['bytes']:,}")
        + (f"{row['milliseconds']:,.2f}", f"{row['hidden_milliseconds']:,.2f}", f"{row['hidden_fraction']:.1%}")
        for row in rows(traces)
    ]


def _label(kind: str, shares: dict[str, float]) -> str:
    return f"{KINDS[kind]}, {shares[kind]:.0%} hidden" if kind in shares else "computation"


def _thinned(spans: list[Span], pixel: float) -> list[Span]:
    """Spans to draw. If there are more than `_MOST`, spans that are closer than a pixel become one span."""
    if len(spans) <= _MOST:
        return spans
    merged = union((span.start - pixel / 2, span.end + pixel / 2) for span in spans)
    return [
        Span(kind=spans[0].kind, name=f"several of {spans[0].name}", start=start + pixel / 2, end=end - pixel / 2)
        for start, end in merged
    ]
