# SPDX-License-Identifier: Apache-2.0
"""Charts on axes that compare: stacked bars, and scattered points. Values appear under the pointer."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Optional

from nemo2.report.pictures.charts import Axes, apart
from nemo2.report.pictures.svg import COLOURS, Canvas, legend, nice_ticks, text_width, tick_text

_WIDTH = 820


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A bar: its parts by name, in stacking order. No part is negative."""

    name: str
    parts: Mapping[str, float]
    note: str = ""
    """Shown under the pointer, over the whole bar."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A line across all bars, such as a GPU's memory. The total of a bar beyond it has another color."""

    name: str
    value: float
    kept_free: float = 0.0
    """The part of ``value`` that bars must not use. It is shaded, and the line marks its start."""

    @property
    def most(self) -> float:
        """The largest total within the limit."""
        return self.value - self.kept_free


@dataclass(frozen=True, kw_only=True)
class Point:
    x: float
    y: float
    group: str = ""
    """Points of a group share a color. Up to eight groups have distinct colors."""
    label: str = ""
    """The text at the right end of a line from the point. "": no label."""
    tip: str = ""
    """The text under the pointer."""


def stacked_bars(
    title: str,
    bars: Sequence[Bar],
    *,
    unit: str,
    limit: Optional[Limit] = None,
    text: Callable[[float], str] = tick_text,
) -> Canvas:
    """Horizontal bars over one axis that starts at zero.

    Args:
        title: The accessible name.
        bars: From top to bottom. A part has the same color in all bars; up to eight parts have distinct colors.
        unit: The unit of the axis.
        limit: The value of a vertical line. None: no line.
        text: A function that formats values, with their unit if wanted.
    """
    totals = [sum(bar.parts.values()) for bar in bars]
    canvas, row = Canvas(_WIDTH, 0, title=title), 28
    names = dict.fromkeys(name for bar in bars for name in bar.parts)
    fills, top = _legend(canvas, names, 8, within=_WIDTH - 132)
    top += 20 * bool(limit)
    left = min(150, 20 + max((text_width(bar.name) for bar in bars), default=0))
    right = _WIDTH - 24 - max((text_width(text(total)) * 1.08 for total in totals), default=0)
    ticks = nice_ticks(0, max(0.0, *totals, limit.value if limit else 0.0) or 1.0)
    axes = Axes(canvas, (0, ticks[-1]), (0, 1), left, right, top, top + row * len(bars))
    axes.draw_x(ticks, unit, grid=True)
    canvas.height = axes.bottom + 46
    if limit is not None and limit.kept_free > 0:
        tip = f"{text(limit.kept_free)} of {text(limit.value)} are kept free"
        across = axes.x(limit.value) - axes.x(limit.most)
        canvas.rect(axes.x(limit.most), top, across, axes.bottom - top, "tint", tip=tip)
    for index, (bar, total) in enumerate(zip(bars, totals, strict=True)):
        y, done, over = top + index * row, 0.0, limit is not None and total > limit.most
        canvas.text(left - 8, y + 18, bar.name, "ink", anchor="end", tip=bar.note)
        for name, value in bar.parts.items():
            note = f"{bar.name}: {name} {text(value)} of {text(total)}" + (f"\n{bar.note}" if bar.note else "")
            canvas.rect(axes.x(done), y + 4, axes.x(value) - left, row - 8, fills[name], tip=note)
            done += value
        # Totals have a column of their own, because next to a bar they would cover lines.
        canvas.text(_WIDTH - 12, y + 18, text(total), "bad" if over else "ink", anchor="end", strong=over)
    if limit is not None:
        x, wide = axes.x(limit.most), text_width(limit.name)
        canvas.line(x, top - 4, x, axes.bottom + 2, "bad", dashed=True)
        if limit.kept_free > 0:
            canvas.line(axes.x(limit.value), top, axes.x(limit.value), axes.bottom + 2, "soft")
        canvas.text(min(max(x - wide / 2, 8), _WIDTH - 8 - wide), top - 9, limit.name, "bad")
    return canvas


def scatter_chart(title: str, points: Sequence[Point], *, x_label: str, y_label: str) -> Canvas:
    """The points on two linear axes, which need not start at zero. Without points the chart says so.

    A line goes through the points that no other point beats on both axes. Less is better on each axis.
    """
    canvas = Canvas(_WIDTH, 420, title=title)
    if not points:
        canvas.text(_WIDTH / 2, canvas.height / 2, f"no values of {y_label}", anchor="middle")
        return canvas
    x_ticks, y_ticks = (nice_ticks(min(some), max(some)) for some in zip(*((p.x, p.y) for p in points), strict=True))
    groups = dict.fromkeys(point.group for point in points)
    fills, top = _legend(canvas, groups, 24 + text_width(y_label), within=_WIDTH - 24)
    right = _WIDTH - 24 - max(text_width(point.label) for point in points) - 12
    axes = Axes(canvas, (x_ticks[0], x_ticks[-1]), (y_ticks[0], y_ticks[-1]), 64, right, top + 6, canvas.height - 46)
    axes.draw_y(y_ticks, y_label)
    axes.draw_x(x_ticks, x_label, grid=True)
    best = _frontier(points)
    for one, other in zip(best, best[1:], strict=False):
        canvas.line(axes.x(one.x), axes.y(one.y), axes.x(other.x), axes.y(other.y), "accent")
    labelled = [(axes.y(point.y), axes.x(point.x), point.label) for point in points if point.label]
    for y, (at, x, words) in apart(labelled, 15):
        canvas.line(x, at, right, at, "soft", dashed=True)
        canvas.line(right, at, right + 8, y, "soft")
        canvas.text(right + 11, y + 4, words, "ink", strong=True)
    for point in points:
        tip = point.tip or f"{point.x:.6g}, {point.y:.6g}"
        canvas.circle(axes.x(point.x), axes.y(point.y), 4.5, fills[point.group], tip=tip, outline=True)
    return canvas


def _legend(canvas: Canvas, names: Iterable[str], x: float, *, within: float) -> tuple[dict[str, str], float]:
    """Draw the fill of each name, in rows of this width. Returns the fills, and where the plot may begin."""
    fills = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}
    start, y = x, 16.0
    for name, fill in fills.items():
        if start > x and start + 35 + text_width(name) > within:
            start, y = x, y + 20
        if name:
            start = legend(canvas, start, y, [(fill, name)]) + 18
    return fills, y + 18


def _frontier(points: Sequence[Point]) -> list[Point]:
    best: list[Point] = []
    for point in sorted(points, key=lambda point: (point.x, point.y)):
        if not best or point.y < best[-1].y:
            best.append(point)
    return best
