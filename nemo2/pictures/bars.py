# SPDX-License-Identifier: Apache-2.0
"""Stacked bars: the parts of a whole, with one bar per stage, rank or variant."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Optional

from nemo2.pictures.svg import COLOURS, Canvas, legend, nice_ticks, text_width, tick_text, tick_texts

_LABEL, _RIGHT, _TOP, _ROW = 150, 12, 34, 28


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


def stacked_bars(
    title: str,
    bars: Sequence[Bar],
    *,
    unit: str,
    limit: Optional[Limit] = None,
    width: int = 820,
    text: Callable[[float], str] = tick_text,
) -> Canvas:
    """Horizontal bars over one axis that starts at zero.

    Args:
        title: The accessible name.
        bars: From top to bottom. A part has the same color in all bars; up to eight parts have distinct colors.
        unit: The unit of the axis.
        limit: The value of a vertical line. None: no line.
        width: The width of the picture, in pixels.
        text: A function that formats values, with their unit if wanted.
    """
    names = list(dict.fromkeys(name for bar in bars for name in bar.parts))
    fills = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}
    label = min(_LABEL, 20 + max((text_width(bar.name) for bar in bars), default=0))
    longest = max([sum(bar.parts.values()) for bar in bars] + ([limit.value] if limit else []), default=0) or 1
    ticks = nice_ticks(0, longest)
    rows, per_row = _legend_rows(names, width)
    totals = max((text_width(text(sum(bar.parts.values()))) * 1.08 for bar in bars), default=0)
    right = width - _RIGHT - totals - 12
    top = _TOP + 20 * (rows - 1 + bool(limit))
    bottom = top + _ROW * len(bars)
    canvas = Canvas(width, bottom + 46, title=title)
    for index in range(rows):
        legend(canvas, 8, 16 + 20 * index, [(fills[name], name) for name in per_row[index]])
    across = (right - label) / ticks[-1]
    for tick, words in zip(ticks, tick_texts(ticks), strict=True):
        x = label + tick * across
        canvas.line(x, top, x, bottom)
        canvas.text(x, bottom + 16, words, anchor="middle")
    canvas.text((label + right) / 2, bottom + 36, unit, anchor="middle")
    if limit is not None and limit.kept_free > 0:
        tip = f"{text(limit.kept_free)} of {text(limit.value)} are kept free"
        canvas.rect(label + limit.most * across, top, limit.kept_free * across, bottom - top, "tint", tip=tip)
    for row, bar in enumerate(bars):
        y, x, total = top + row * _ROW, float(label), sum(bar.parts.values())
        canvas.text(label - 8, y + 18, bar.name, "ink", anchor="end", tip=bar.note)
        for name, value in bar.parts.items():
            note = f"{bar.name}: {name} {text(value)} of {text(total)}" + (f"\n{bar.note}" if bar.note else "")
            canvas.rect(x, y + 4, value * across, _ROW - 8, fills[name], tip=note)
            x += value * across
        over = limit is not None and total > limit.most
        # Totals have a column of their own, because next to a bar they would cover lines.
        canvas.text(width - _RIGHT, y + 18, text(total), "bad" if over else "ink", anchor="end", strong=over)
    if limit is not None:
        x, wide = label + limit.most * across, text_width(limit.name)
        canvas.line(x, top - 4, x, bottom + 2, "bad", dashed=True)
        if limit.kept_free > 0:
            end = label + limit.value * across
            canvas.line(end, top, end, bottom + 2, "soft")
        canvas.text(min(max(x - wide / 2, 8), width - 8 - wide), top - 9, limit.name, "bad")
    return canvas


def _legend_rows(names: list[str], width: int) -> tuple[int, list[list[str]]]:
    rows: list[list[str]] = [[]]
    used = 8.0
    for name in names:
        needed = 35 + text_width(name)
        if rows[-1] and used + needed > width - 140:
            rows.append([])
            used = 8.0
        rows[-1].append(name)
        used += needed
    return len(rows), rows
