# SPDX-License-Identifier: Apache-2.0
"""Line charts as SVG text, without a plotting library, for light and dark pages. Values appear under the pointer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from statistics import median
from typing import Optional

from nemo2.pictures.svg import natural_size, nice_ticks, text_width, tick_text, tick_texts

WIDTH, HEIGHT = 760, 340
LEFT, RIGHT, TOP, BOTTOM = 58, 92, 30, 44
_MAX_POINTS = 800
_MAX_TARGETS = 240
SMOOTH_FROM = 60
"""The smallest number of points over which a median is drawn."""
_COLOURS = (("#1a7f37", "#56d364"), ("#8250df", "#d2a8ff"), ("#bf3989", "#ff9bce"), ("#0a7b83", "#56d4dd"),
            ("#7d6608", "#e3c341"), ("#57606a", "#b1bac4"))  # fmt: skip
"""The colors of the third and further lines, on light and on dark. The first two are in every page's style."""


def _rules(theme: int) -> str:
    return "".join(
        f".chart .s{index}{{stroke:{pair[theme]}}}.chart text.s{index}{{fill:{pair[theme]};stroke:none}}"
        f".chart circle.s{index}{{fill:{pair[theme]}}}"
        for index, pair in enumerate(_COLOURS, start=2)
    )


_MORE_COLOURS = f"<style>{_rules(0)}@media(prefers-color-scheme:dark){{{_rules(1)}}}</style>"


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


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    y_label: str,
    x_label: str = "step",
    width: int = WIDTH,
    marks: Sequence[Mark] = (),
) -> str:
    """The chart as an ``<svg class="chart">`` element. Up to eight series have distinct colors.

    ``width`` is in the units of the height (340) and the text (12): a narrower chart has relatively larger text. An
    empty chart says that there is nothing to show.
    """
    finite = [(x, y) for one in series for x, y in one.points if math.isfinite(y)]
    head = (
        f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" {natural_size(width, HEIGHT, smallest=12)} role="img" '
        f'aria-label="{escape(title)}">'
    )
    if not finite:
        nothing = f'<text x="{width / 2}" y="{HEIGHT / 2}" text-anchor="middle">no values of {escape(y_label)}</text>'
        return f"{head}{nothing}</svg>"
    x_low, x_high = min(x for x, _ in finite), max(x for x, _ in finite)
    y_ticks = nice_ticks(*_visible_range([y for _, y in finite]))
    # Bold letters are wider.
    room = max(RIGHT, 16 + max(text_width(f"{one.name} 0.00000") * 1.12 for one in series))
    scale = _Scale(x_low, max(x_high, x_low + 1), y_ticks[0], y_ticks[-1], right=width - room)
    parts = [
        head,
        _MORE_COLOURS if len(series) > 2 else "",
        *_axes(scale, nice_ticks(x_low, scale.x_high, whole=True), y_ticks, x_label, y_label),
        *_marks(marks, scale, free_from=8 + text_width(y_label) + 12),
    ]
    labels = []
    for index, one in enumerate(series):
        if not any(math.isfinite(y) for _, y in one.points):
            continue
        smooth = one.smooth and len(one.points) >= SMOOTH_FROM
        if smooth and one.raw:
            parts.append(f'<path class="line raw s{index}" d="{_path(thin_out(one.points), scale)}"/>')
        drawn = running_median(one.points) if smooth else one.points
        parts.append(f'<path class="line s{index}" d="{_path(thin_out(drawn), scale)}"/>')
        if one.markers:
            parts += [
                f'<circle class="s{index}" cx="{scale.x(x):.1f}" cy="{scale.y(y):.1f}" r="3"/>'
                for x, y in one.points
                if math.isfinite(y)
            ]
        last = next(y for _, y in reversed(drawn) if math.isfinite(y))
        labels.append((scale.y(last), index, f"{one.name} {tick_text(float(f'{last:.4g}'))}".strip()))
    parts += _end_labels(labels, scale.right + 8)
    parts += _targets(series, scale)
    return "".join(parts) + "</svg>"


def running_median(points: Sequence[tuple[float, float]], *, share: float = 0.03) -> list[tuple[float, float]]:
    """The median around each point over about ``share`` of all points. It has no lag and ignores single slow steps.

    The window shrinks towards both ends, so that it stays centered. Gaps stay gaps.
    """
    reach = max(1, round(share * len(points) / 2))
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
        finite = [point for point in part if math.isfinite(point[1])]
        if not finite:
            kept.append(part[0])
            continue
        kept += sorted({min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1])})
    return kept


class _Scale:
    def __init__(self, x_low: float, x_high: float, y_low: float, y_high: float, *, right: float) -> None:
        self.x_low, self.x_high, self.y_low, self.y_high = x_low, x_high, y_low, y_high
        self.right = right

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (self.right - LEFT)

    def y(self, value: float) -> float:
        clamped = min(max(value, self.y_low), self.y_high)
        return HEIGHT - BOTTOM - (clamped - self.y_low) / (self.y_high - self.y_low) * (HEIGHT - TOP - BOTTOM)


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


def _axes(scale: _Scale, x_ticks: list[float], y_ticks: list[float], x_label: str, y_label: str) -> list[str]:
    right, bottom = scale.right, HEIGHT - BOTTOM
    parts = [f'<text x="8" y="14">{escape(y_label)}</text>']
    for tick, words in zip(y_ticks, tick_texts(y_ticks), strict=True):
        y = scale.y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{words}</text>')
    for tick in x_ticks:
        parts.append(f'<text x="{scale.x(tick):.1f}" y="{bottom + 18}" text-anchor="middle">{tick_text(tick)}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    parts.append(f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>')
    return parts


def _marks(marks: Sequence[Mark], scale: _Scale, *, free_from: float) -> list[str]:
    """Lines from the top of the plot to its axis, with labels above. Labels that would overlap are omitted."""
    parts = []
    for mark in sorted(marks, key=lambda mark: mark.x):
        ends = [scale.x(min(max(x, scale.x_low), scale.x_high)) for x in (mark.x, mark.until) if x is not None]
        tip = f"<title>{escape(mark.words)}</title>"
        left, right = min(ends), max(ends)
        if right - left >= 1:
            parts.append(
                f'<rect class="again" x="{left:.1f}" y="{TOP}" width="{right - left:.1f}" '
                f'height="{HEIGHT - TOP - BOTTOM}">{tip}</rect>'
            )
        for x in dict.fromkeys(ends):
            parts.append(
                f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 4}" y2="{HEIGHT - BOTTOM}">{tip}</line>'
            )
        wide = text_width(mark.words)
        start = min(max((left + right - wide) / 2, free_from), scale.right + RIGHT - 12 - wide)
        if start >= free_from and left - wide <= start <= right:
            parts.append(f'<text x="{start:.1f}" y="{TOP - 9}">{escape(mark.words)}{tip}</text>')
            free_from = start + wide + 12
    return parts


def _path(points: Sequence[tuple[float, float]], scale: _Scale) -> str:
    commands, pen_down = [], False
    for x, y in points:
        if not math.isfinite(y):
            pen_down = False
            continue
        commands.append(f"{'L' if pen_down else 'M'}{scale.x(x):.1f} {scale.y(y):.1f}")
        pen_down = True
    return "".join(commands)


def _end_labels(labels: list[tuple[float, int, str]], x: float) -> list[str]:
    """The name and last value of each line at its right end, moved apart if they would overlap."""
    parts, free_from = [], -math.inf
    for y, index, text in sorted(labels):
        y = max(y, free_from)
        free_from = y + 15
        parts.append(f'<text class="label s{index}" x="{x:.0f}" y="{y + 4:.1f}">{escape(text)}</text>')
    return parts


def _targets(series: Sequence[Series], scale: _Scale) -> list[str]:
    """Invisible columns that name the values when pointed at."""
    by_step: dict[float, list[str]] = {}
    for one in series:
        for x, y in one.points:
            by_step.setdefault(x, []).append(f"{one.name} {y:.5g}")
    steps = sorted(by_step)
    # Steps with a rare value, such as a validation's, are kept even if other steps are dropped.
    stride = max(1, math.ceil(len(steps) / _MAX_TARGETS))
    shown = [step for number, step in enumerate(steps) if number % stride == 0 or len(by_step[step]) > 1]
    parts = []
    for number, step in enumerate(shown):
        left = scale.x((shown[number - 1] + step) / 2) if number else float(LEFT)
        right = scale.x((step + shown[number + 1]) / 2) if number + 1 < len(shown) else scale.right
        text = escape(f"step {step:,.6g}: {', '.join(by_step[step])}")
        parts.append(
            f'<rect class="hit" x="{left:.1f}" y="{TOP}" width="{max(right - left, 0.5):.1f}" '
            f'height="{HEIGHT - TOP - BOTTOM}"><title>{text}</title></rect>'
        )
    return parts
