# SPDX-License-Identifier: Apache-2.0
"""Points in a plane, such as layouts by memory and step time, with those that nothing beats joined by a line."""

from collections.abc import Sequence
from dataclasses import dataclass

from nemo2.pictures.svg import COLOURS, Canvas, legend, nice_ticks, text_width, tick_text

_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 40, 46


@dataclass(frozen=True, kw_only=True)
class Point:
    x: float
    y: float
    group: str = ""
    """Points of a group share a colour; up to eight groups are told apart."""
    label: str = ""
    """Written beside the point; for the few that matter."""
    tip: str = ""
    """Shown under the pointer."""


def scatter_chart(
    title: str,
    points: Sequence[Point],
    *,
    x_label: str,
    y_label: str,
    frontier: bool = False,
    width: int = 820,
    height: int = 420,
) -> Canvas:
    """The points on two linear axes that need not start at zero; nothing drawn but a sentence if there are none.

    ``frontier`` joins the points that no other beats in both directions, less being better in each.
    """
    canvas = Canvas(width, height, title=title)
    if not points:
        canvas.text(width / 2, height / 2, f"no values of {y_label}", anchor="middle")
        return canvas
    x_ticks = nice_ticks(min(point.x for point in points), max(point.x for point in points))
    y_ticks = nice_ticks(min(point.y for point in points), max(point.y for point in points))
    right, bottom = width - _RIGHT, height - _BOTTOM

    def place(point: Point) -> tuple[float, float]:
        x = _LEFT + (point.x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0]) * (right - _LEFT)
        return x, bottom - (point.y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]) * (bottom - _TOP)

    for tick in y_ticks:
        _, y = place(Point(x=x_ticks[0], y=tick))
        canvas.line(_LEFT, y, right, y)
        canvas.text(_LEFT - 8, y + 4, tick_text(tick), anchor="end")
    for tick in x_ticks:
        x, _ = place(Point(x=tick, y=y_ticks[0]))
        canvas.line(x, _TOP, x, bottom)
        canvas.text(x, bottom + 18, tick_text(tick), anchor="middle")
    canvas.text(8, 16, y_label)
    canvas.text((_LEFT + right) / 2, height - 8, x_label, anchor="middle")
    groups = list(dict.fromkeys(point.group for point in points))
    fills = {group: COLOURS[index % len(COLOURS)] for index, group in enumerate(groups)}
    if groups != [""]:
        legend(canvas, 24 + text_width(y_label), 16, [(fills[group], group) for group in groups])
    if frontier:
        best = _frontier(points)
        for one, other in zip(best, best[1:], strict=False):
            canvas.line(*place(one), *place(other), "accent")
    for point in points:
        x, y = place(point)
        canvas.circle(x, y, 4.5, fills[point.group], tip=point.tip or f"{point.x:.6g}, {point.y:.6g}", outline=True)
        if point.label:
            at_end = x + 8 + text_width(point.label) > width
            canvas.text(x - 8 if at_end else x + 8, y - 6, point.label, "ink", anchor="end" if at_end else "start")
    return canvas


def _frontier(points: Sequence[Point]) -> list[Point]:
    best: list[Point] = []
    for point in sorted(points, key=lambda point: (point.x, point.y)):
        if not best or point.y < best[-1].y:
            best.append(point)
    return best
