# SPDX-License-Identifier: Apache-2.0
"""Scatter charts, such as layouts by memory and step time, with a line through the Pareto-optimal points."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nemo2.pictures.svg import COLOURS, Canvas, legend, nice_ticks, text_width, tick_texts

_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 40, 46
_RADIUS = 4.5
_BESIDE = 24
"""The largest distance from the middle of a label to its dot, in pixels. A line joins a more distant label to its dot."""

Place = tuple[float, float]
Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


@dataclass(frozen=True, kw_only=True)
class Point:
    x: float
    y: float
    group: str = ""
    """Points of a group share a color. Up to eight groups have distinct colors."""
    label: str = ""
    """The text next to the point. "": no label."""
    tip: str = ""
    """The text under the pointer."""


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
    """The points on two linear axes, which need not start at zero. Without points the chart says so.

    ``frontier`` draws a line through the points that no other point beats on both axes. Less is better on each axis.
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

    for tick, words in zip(y_ticks, tick_texts(y_ticks), strict=True):
        _, y = place(Point(x=x_ticks[0], y=tick))
        canvas.line(_LEFT, y, right, y)
        canvas.text(_LEFT - 8, y + 4, words, anchor="end")
    for tick, words in zip(x_ticks, tick_texts(x_ticks), strict=True):
        x, _ = place(Point(x=tick, y=y_ticks[0]))
        canvas.line(x, _TOP, x, bottom)
        canvas.text(x, bottom + 18, words, anchor="middle")
    canvas.text(8, 16, y_label)
    canvas.text((_LEFT + right) / 2, height - 8, x_label, anchor="middle")
    groups = list(dict.fromkeys(point.group for point in points))
    fills = {group: COLOURS[index % len(COLOURS)] for index, group in enumerate(groups)}
    if groups != [""]:
        legend(canvas, 24 + text_width(y_label), 16, [(fills[group], group) for group in groups])
    joints = [place(one) for one in _frontier(points)] if frontier else []
    segments = list(zip(joints, joints[1:], strict=False))
    for one, other in segments:
        canvas.line(*one, *other, "accent")
    for point in points:
        x, y = place(point)
        canvas.circle(x, y, _RADIUS, fills[point.group], tip=point.tip or f"{point.x:.6g}, {point.y:.6g}", outline=True)
    dots = [place(point) for point in points]
    taken: list[Box] = []
    for point in points:
        if point.label:
            spot = _free_spot(place(point), point.label, dots, segments, taken, within=(_LEFT, _TOP, right, bottom))
            taken.append(spot)
            left, _, _, low = spot
            if math.dist(place(point), ((spot[0] + spot[2]) / 2, (spot[1] + spot[3]) / 2)) > _BESIDE:
                canvas.line(*place(point), *_nearest(spot, place(point)), "soft")
            canvas.text(left, low - 2, point.label, "ink", strong=True, halo=True, tip=point.tip)
    return canvas


def _free_spot(
    dot: Place,
    words: str,
    dots: Sequence[Place],
    segments: Sequence[tuple[Place, Place]],
    taken: Sequence[Box],
    *,
    within: Box,
) -> Box:
    """The box nearest to a dot in which a label covers no dot, line or other label. Without such a box: next to the dot."""
    wide, high = text_width(words) * 1.08, 12.0
    spots = []
    for away in (_RADIUS + 3, _RADIUS + 12, _RADIUS + 24, _RADIUS + 40, _RADIUS + 60):
        for angle in (-45, 45, -135, 135, -90, 90, 0, 180):
            x, y = dot[0] + away * math.cos(math.radians(angle)), dot[1] + away * math.sin(math.radians(angle))
            across, down = math.cos(math.radians(angle)), math.sin(math.radians(angle))
            left, top = x + (across - 1) / 2 * wide, y + (down - 1) / 2 * high
            spots.append((left, top, left + wide, top + high))
    for spot in spots:
        inside = within[0] <= spot[0] and within[1] <= spot[1] and spot[2] <= within[2] and spot[3] <= within[3]
        if (
            inside
            and not any(math.dist(_nearest(spot, one), one) < _RADIUS + 1 for one in dots)
            and not any(_crosses(spot, *segment) for segment in segments)
            and not any(_overlap(spot, other) for other in taken)
        ):
            return spot
    return spots[0]


def _nearest(box: Box, point: Place) -> Place:
    """The point of a box that is nearest to ``point``."""
    return min(max(point[0], box[0]), box[2]), min(max(point[1], box[1]), box[3])


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _crosses(box: Box, start: Place, end: Place) -> bool:
    """Whether a line passes through a box."""
    low, high = 0.0, 1.0
    for axis in (0, 1):
        step = end[axis] - start[axis]
        if abs(step) < 1e-9:
            if not box[axis] < start[axis] < box[axis + 2]:
                return False
            continue
        first, last = sorted(((box[axis] - start[axis]) / step, (box[axis + 2] - start[axis]) / step))
        low, high = max(low, first), min(high, last)
    return low < high


def _frontier(points: Sequence[Point]) -> list[Point]:
    best: list[Point] = []
    for point in sorted(points, key=lambda point: (point.x, point.y)):
        if not best or point.y < best[-1].y:
            best.append(point)
    return best
