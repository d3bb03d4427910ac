# SPDX-License-Identifier: Apache-2.0
"""Charts on axes: lines over steps. Values appear under the pointer.

Without a plotting library, so that a page follows the theme of its reader and needs no import that Lightning would pay for.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Optional

from nemo2.report.pictures.svg import COLOURS, Canvas, nice_ticks, text_width, tick_text, tick_texts

WIDTH, HEIGHT, TOP = 760, 340, 30
_RIGHT, _BOTTOM, _LEFT = 92, 44, 58
_MAX_POINTS, _MAX_TARGETS = 800, 240
SMOOTH_FROM = 60
"""The smallest number of points over which a median is drawn."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """A line: ``points`` are ``(step, value)`` by step. Values that are not finite leave a gap.

    ``markers`` also draws the points, for the few of a validation. ``smooth`` adds a running median, which without
    ``raw`` is drawn alone.
    """

    name: str
    points: Sequence[tuple[float, float]]
    markers: bool = False
    smooth: bool = False
    raw: bool = True


@dataclass(frozen=True, kw_only=True)
class Mark:
    """An event at a step, drawn as a dashed line, or a range of steps."""

    x: float
    words: str
    """The label, shown under the pointer, and above the line if there is room."""
    until: Optional[float] = None
    """The other end of a range of steps, which is shaded. None: a single step."""


@dataclass(frozen=True)
class Axes:
    """Two linear axes on a canvas, from the lower left corner of the plot to its upper right."""

    canvas: Canvas
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    left: float
    right: float
    top: float
    bottom: float

    def x(self, value: float) -> float:
        low, high = self.x_range
        return self.left + (min(max(value, low), high) - low) / (high - low) * (self.right - self.left)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return self.bottom - (min(max(value, low), high) - low) / (high - low) * (self.bottom - self.top)

    def draw_x(self, ticks: list[float], label: str, *, grid: bool) -> None:
        for tick, words in zip(ticks, tick_texts(ticks), strict=True):
            if grid:
                self.canvas.line(self.x(tick), self.top, self.x(tick), self.bottom)
            self.canvas.text(self.x(tick), self.bottom + 18, words, anchor="middle")
        if not grid:
            self.canvas.line(self.left, self.bottom, self.right, self.bottom, "soft")
        self.canvas.text((self.left + self.right) / 2, self.bottom + 36, label, anchor="middle")

    def draw_y(self, ticks: list[float], label: str) -> None:
        for tick, words in zip(ticks, tick_texts(ticks), strict=True):
            self.canvas.line(self.left, self.y(tick), self.right, self.y(tick))
            self.canvas.text(self.left - 8, self.y(tick) + 4, words, anchor="end")
        self.canvas.text(8, 14, label)


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    y_label: str,
    x_label: str = "step",
    width: int = WIDTH,
    marks: Sequence[Mark] = (),
) -> str:
    """The chart as an ``<svg>`` element. Up to eight series have distinct colors.

    A narrower chart has relatively larger text. An empty chart says that there is nothing to show.
    """
    canvas = Canvas(width, HEIGHT, title=title, smallest=12)
    series = [one for one in series if any(math.isfinite(y) for _, y in one.points)]
    if not series:
        canvas.text(width / 2, HEIGHT / 2, f"no values of {y_label}", anchor="middle")
        return canvas.render()
    finite = [(x, y) for one in series for x, y in one.points if math.isfinite(y)]
    x_low, x_high = min(x for x, _ in finite), max(x for x, _ in finite)
    y_ticks = nice_ticks(*_visible_range([y for _, y in finite]))
    # Bold letters are wider.
    right = width - max(_RIGHT, 16 + max(text_width(f"{one.name} 0.00000") * 1.12 for one in series))
    x_range, y_range = (x_low, max(x_high, x_low + 1)), (y_ticks[0], y_ticks[-1])
    axes = Axes(canvas, x_range, y_range, _LEFT, right, TOP, HEIGHT - _BOTTOM)
    axes.draw_y(y_ticks, y_label)
    axes.draw_x(nice_ticks(*x_range, whole=True, count=min(6, int((right - _LEFT) / 60))), x_label, grid=False)
    _marks(axes, marks, free_from=8 + text_width(y_label) + 12)
    labels = []
    for index, one in enumerate(series):
        tone, smooth = f"s{index % len(COLOURS)}", one.smooth and len(one.points) >= SMOOTH_FROM
        drawn = running_median(one.points) if smooth else one.points
        for points, raw in [(one.points, True)] * (smooth and one.raw) + [(drawn, False)]:
            canvas.path(((axes.x(x), axes.y(y) if math.isfinite(y) else y) for x, y in thin_out(points)), tone, raw=raw)
        for x, y in one.points if one.markers else ():
            if math.isfinite(y):
                canvas.circle(axes.x(x), axes.y(y), 3, tone)
        last = next(y for _, y in reversed(drawn) if math.isfinite(y))
        labels.append((axes.y(last), tone, f"{one.name} {tick_text(float(f'{last:.4g}'))}".strip()))
    for y, (_, tone, words) in apart(labels, 15):
        canvas.text(right + 8, y + 4, words, tone, strong=True)
    _targets(axes, series)
    return canvas.render()


def running_median(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The median around each point over about 3% of all points. It has no lag and ignores single slow steps.

    The window shrinks towards both ends, so that it stays centered. Gaps stay gaps.
    """
    reach = max(1, round(0.03 * len(points) / 2))
    smoothed = []
    for index, (x, y) in enumerate(points):
        near = min(reach, index, len(points) - 1 - index)
        values = [value for _, value in points[index - near : index + near + 1] if math.isfinite(value)]
        smoothed.append((x, median(values) if math.isfinite(y) else y))
    return smoothed


def thin_out(points: Sequence[tuple[float, float]], *, limit: int = _MAX_POINTS) -> list[tuple[float, float]]:
    """At most about ``limit`` of the points: the smallest and largest of each stretch, so that no spike is lost."""
    if len(points) <= limit:
        return list(points)
    stretch = math.ceil(len(points) / (limit // 2))
    kept = []
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        finite = [point for point in part if math.isfinite(point[1])] or part[:1]
        kept += sorted({min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1])})
    return kept


def _visible_range(values: list[float]) -> tuple[float, float]:
    """The range to draw. A single outlier (the first step's time) is cut off so that it doesn't flatten the other
    values."""
    ordered = sorted(values)
    low, high = ordered[0], ordered[-1]
    if len(ordered) >= 20:
        middle = ordered[len(ordered) // 2]
        upper = ordered[int(len(ordered) * 0.98) - 1]
        if high - middle > 8 * max(upper - middle, abs(middle) * 0.02):
            high = upper + (upper - low) * 0.25
    return low, high


def _marks(axes: Axes, marks: Sequence[Mark], *, free_from: float) -> None:
    """Lines from the top of the plot to its axis, with labels above. Labels that would overlap are omitted."""
    for mark in sorted(marks, key=lambda mark: mark.x):
        ends = [axes.x(x) for x in (mark.x, mark.until) if x is not None]
        left, right = min(ends), max(ends)
        if right - left >= 1:
            axes.canvas.rect(left, TOP, right - left, axes.bottom - TOP, "shade", tip=mark.words)
        for x in dict.fromkeys(ends):
            axes.canvas.line(x, TOP - 4, x, axes.bottom, "soft", dashed=True, tip=mark.words)
        wide = text_width(mark.words)
        start = min(max((left + right - wide) / 2, free_from), axes.right + _RIGHT - 12 - wide)
        if start >= free_from and left - wide <= start <= right:
            axes.canvas.text(start, TOP - 9, mark.words, tip=mark.words)
            free_from = start + wide + 12


def _targets(axes: Axes, series: Sequence[Series]) -> None:
    """Invisible columns that name the values when pointed at."""
    by_step: dict[float, list[str]] = {}
    for one in series:
        for x, y in one.points:
            by_step.setdefault(x, []).append(f"{one.name} {y:.5g}")
    steps = sorted(by_step)
    # Steps with a rare value, such as a validation's, are kept even if other steps are dropped.
    stride = max(1, math.ceil(len(steps) / _MAX_TARGETS))
    shown = [step for number, step in enumerate(steps) if number % stride == 0 or len(by_step[step]) > 1]
    middles = [axes.x((one + other) / 2) for one, other in zip(shown, shown[1:], strict=False)]
    for step, left, right in zip(shown, [axes.left, *middles], [*middles, axes.right], strict=True):
        tip = f"step {step:,.6g}: {', '.join(by_step[step])}"
        axes.canvas.rect(left, TOP, max(right - left, 0.5), axes.bottom - TOP, "hit", tip=tip)


def apart(labels: Sequence[tuple[float, Any, str]], gap: float) -> Iterable[tuple[float, tuple[float, Any, str]]]:
    """Each label by its height, its first entry, with a height at which it is apart from the one below."""
    free_from = math.inf
    for label in sorted(labels, reverse=True):
        free_from = min(label[0], free_from)
        yield free_from, label
        free_from -= gap
