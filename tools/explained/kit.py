# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the explaining figures: a narrow sheet, boxes with words in them, and the names of real objects."""

from typing import Any

from nemo2.report.pictures.svg import Canvas, text_width

WIDTH = 392
"""In CSS pixels: as wide as a phone, on which the site shows figures from edge to edge."""
LEFT, TOP, SMALL = 8.0, 32.0, 11.0

OF_RANK = ("c0", "c1", "c3", "c5")
"""The fill of what a rank holds."""
COMMUNICATION, PLAIN, ELSEWHERE = "c2", "c7", "card"
"""A collective or a message; what is the same on all ranks; what a rank doesn't hold."""
FORWARD, BACKWARD = "c0", "c1"
"""Passes, in figures of time; `nemo2.report.pictures.pipeline` has the same."""


def sheet(title: str) -> Canvas:
    """An empty figure with its title; what is drawn starts at `TOP`, and `signed` sets its height."""
    canvas = Canvas(WIDTH, 0, title=title)
    assert text_width(title, 13) * 1.12 <= WIDTH - 2 * LEFT, title  # bold letters are wider
    canvas.text(LEFT, 17, title, "ink", size=13, strong=True)
    return canvas


def box(
    canvas: Canvas,
    x: float,
    y: float,
    width: float,
    height: float,
    words: object = "",
    fill: str = PLAIN,
    *,
    size: float = 12,
    tip: str = "",
    outline: bool = True,
) -> None:
    """A rectangle with lines of words in its middle; words that don't fit are a mistake of the figure."""
    canvas.rect(x, y, width, height, fill, radius=3, outline="edge" if outline else "", tip=tip)
    lines = str(words).split("\n") if str(words) else []
    for index, line in enumerate(lines):
        assert text_width(line, size) <= width + 4, f"{canvas.title}: {line!r} is wider than its box of {width:.0f}"
        middle = y + height / 2 + (index - (len(lines) - 1) / 2) * (size + 2) + size * 0.36
        canvas.text(x + width / 2, middle, line, "ink", anchor="middle", size=size)


def note(canvas: Canvas, y: float, words: str, *, x: float = LEFT, tone: str = "soft", size: float = SMALL) -> float:
    """Words broken into lines within the sheet; returns the baseline after the last of them."""
    line = ""
    for word in words.split():
        if line and x + text_width(f"{line} {word}", size) * 1.05 > WIDTH - 4:
            canvas.text(x, y, line, tone, size=size)
            line, y = word, y + size + 4
        else:
            line = f"{line} {word}".strip()
    canvas.text(x, y, line, tone, size=size)
    return y + size + 4


def signed(canvas: Canvas, y: float, *objects: Any) -> Canvas:
    """End the figure below ``y`` with the names of the classes and functions that do what it shows."""
    names = ", ".join(dict.fromkeys(one.__qualname__.removesuffix(".__init__") for one in objects))
    canvas.height = note(canvas, y + 16, names, tone="accent") - 6
    canvas.description = f"In code: {names}"
    return canvas
