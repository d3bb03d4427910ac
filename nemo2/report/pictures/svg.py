# SPDX-License-Identifier: Apache-2.0
"""SVG as text: a canvas of rectangles, lines and words, its colors, and round numbers for axes.

A picture is a string for an HTML page, whose style comes from `nemo2.report.pictures.page`, or for a file of its own
(`standalone`). Colors have names, so that one stylesheet serves light and dark pages.
"""

import math
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Literal

COLOURS = ("c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7")
"""Eight fills that differ in hue and lightness. Words in ``ink`` are legible on each of them, in both themes."""

Anchor = Literal["start", "middle", "end"]

SMALLEST_TEXT = 11
"""The smallest size of text, in CSS pixels. A page that is too narrow for a picture scrolls it instead of shrinking it."""

STYLE = Path(__file__).with_name("picture.css").read_text(encoding="utf-8")
"""The style of all pictures, by the names of fills, tones and words."""


class Canvas:
    """A picture that is drawn piece by piece. Later pieces cover earlier ones.

    Lengths are in CSS pixels at the picture's natural size. Fills are the names in `COLOURS`, or
    ``ink soft card grid accent bad tint shade hit none``.

    Args:
        width, height: The size of the whole picture. ``height`` may be set again before `render`.
        title: The subject of the picture, which is also its accessible name.
        description: A longer description for screen readers.
        smallest: The size of its smallest text.
    """

    def __init__(
        self, width: float, height: float, *, title: str, description: str = "", smallest: float = SMALLEST_TEXT
    ) -> None:
        self.width, self.height = width, height
        self.title, self.description, self.smallest = title, description, smallest
        self._parts: list[str] = []

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str = "c0",
        *,
        tip: str = "",
        radius: float = 0,
        outline: Literal["", "edge"] = "",
        dark: bool = False,
    ) -> None:
        """Draw a rectangle. ``tip`` is shown under the pointer. The outline "edge" is thin and soft."""
        names, w, h = (fill, outline, "dark" if dark else ""), max(width, 0), max(height, 0)
        self._draw("rect", *names, tip=tip, x=x, y=y, width=w, height=h, rx=radius or None)

    def circle(
        self, x: float, y: float, radius: float, fill: str = "c0", *, tip: str = "", outline: bool = False
    ) -> None:
        self._draw("circle", fill, "edge" if outline else "", tip=tip, cx=x, cy=y, r=radius)

    def line(
        self, x1: float, y1: float, x2: float, y2: float, tone: str = "grid", *, dashed: bool = False, tip: str = ""
    ) -> None:
        """Draw a line in one of the tones ``grid soft ink accent bad``."""
        self._draw("line", tone, tip=tip, x1=x1, y1=y1, x2=x2, y2=y2, stroke_dasharray="4 3" if dashed else None)

    def path(self, points: Iterable[tuple[float, float]], tone: str, *, raw: bool = False) -> None:
        """Draw a curve in a tone ``s0`` to ``s7``, thin and pale if ``raw``. A point that isn't finite leaves a gap."""
        commands, pen = "", "M"
        for x, y in points:
            if math.isfinite(y):
                commands += f"{pen}{x:.1f} {y:.1f}"
            pen = "L" if math.isfinite(y) else "M"
        self._draw("path", tone, "raw" if raw else "", d=commands)

    def arrow(self, x1: float, y1: float, x2: float, y2: float, tone: str = "soft", *, dashed: bool = False) -> None:
        """Draw a line with an arrowhead at its end. For two equal points, draw nothing."""
        length = math.hypot(x2 - x1, y2 - y1)
        if not length:
            return
        along, across = ((x2 - x1) / length, (y2 - y1) / length), ((y1 - y2) / length, (x2 - x1) / length)
        back = min(7.0, length)
        stem = (x2 - along[0] * back, y2 - along[1] * back)
        self.line(x1, y1, *stem, tone, dashed=dashed)
        corners = [(x2, y2), *((stem[0] + across[0] * side, stem[1] + across[1] * side) for side in (3.5, -3.5))]
        self._draw("polygon", tone, points=" ".join(f"{_number(x)},{_number(y)}" for x, y in corners))

    def text(
        self,
        x: float,
        y: float,
        words: object,
        tone: str = "soft",
        *,
        anchor: Anchor = "start",
        size: float = 12,
        strong: bool = False,
        tip: str = "",
    ) -> None:
        """Draw words whose baseline starts, is centered or ends at ``(x, y)``."""
        names = tone, "strong" if strong else ""
        anchored = None if anchor == "start" else anchor
        sized = None if size == 12 else size
        self._draw("text", *names, tip=tip, words=str(words), x=x, y=y, text_anchor=anchored, font_size=sized)

    def _draw(self, tag: str, *names: str, tip: str = "", words: str = "", **attributes: float | str | None) -> None:
        """Add an element. An attribute that is None is left out."""
        listed = "".join(
            f' {name.replace("_", "-")}="{value if isinstance(value, str) else _number(value)}"'
            for name, value in attributes.items()
            if value is not None
        )
        inside = (f"<title>{escape(tip)}</title>" if tip else "") + escape(words)
        start = f'<{tag} class="{" ".join(filter(None, names))}"{listed}'
        self._parts.append(f"{start}>{inside}</{tag}>" if inside else f"{start}/>")

    def place(self, picture: "Canvas", x: float, y: float) -> None:
        """Draw another picture at its natural size with its upper left corner at ``(x, y)``."""
        self._parts.append(f'<g transform="translate({_number(x)} {_number(y)})">{"".join(picture._parts)}</g>')

    def render(self) -> str:
        """The picture as an ``<svg class="picture">`` element."""
        # A page may enlarge the picture, or shrink it until its smallest text has 11 px.
        least = math.ceil(self.width * SMALLEST_TEXT / self.smallest)
        width, height = _number(self.width), _number(self.height)
        described = f"<desc>{escape(self.description)}</desc>" if self.description else ""
        return (
            f'<svg class="picture" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" style="min-width:{least}px" role="img" aria-label="{escape(self.title)}">'
            f"<title>{escape(self.title)}</title>{described}{''.join(self._parts)}</svg>"
        )


def legend(canvas: Canvas, x: float, y: float, entries: list[tuple[str, str]], *, gap: float = 18) -> float:
    """Draw swatches and words in a row that starts at ``(x, y)``, with ``y`` the words' baseline. Returns the row's end."""
    for fill, words in entries:
        canvas.rect(x, y - 10, 12, 12, fill.removesuffix("*"), radius=2, dark=fill.endswith("*"))
        canvas.text(x + 17, y, words)
        x += 17 + text_width(words) + gap
    return x - gap


def stack(pictures: list[Canvas], *, title: str, gap: float = 28) -> Canvas:
    """The pictures stacked vertically in one picture."""
    whole = Canvas(max(picture.width for picture in pictures), 0, title=title)
    whole.description = "; ".join(one.title for one in pictures)
    y = 0.0
    for one in pictures:
        whole.place(one, 0, y)
        y += one.height + gap
    whole.height = y - gap
    return whole


def standalone(picture: str) -> str:
    """``picture`` as the text of an ``.svg`` file: its own style, and a background that follows the viewer's theme."""
    background = "svg{background:#fff}@media(prefers-color-scheme:dark){svg{background:#14171b}}"
    return picture.replace(">", f"><style>{background}{STYLE}</style>", 1) + "\n"


def text_width(words: str, size: float = 12) -> float:
    """The approximate width of ``words`` in pixels, rather too wide than too narrow."""
    narrow = sum(words.count(letter) for letter in "ijlrtf.,:;|'() ·")
    wide = sum(words.count(letter) for letter in "mwMW%")
    return size * (0.58 * (len(words) - narrow - wide) + 0.36 * narrow + 0.9 * wide)


def nice_ticks(low: float, high: float, *, count: int = 6, whole: bool = False) -> list[float]:
    """Round numbers that span ``low`` to ``high``: steps of 1, 2 or 5 times a power of ten.

    The first and last lie on or outside the range. With ``whole``, for step numbers, all lie inside it. A range of less than
    1e-9 of its values is widened, numbers below 1e-300 are taken as 0, and those above 1e300 as 1e300.
    """
    low, high = (0.0 if abs(end) < 1e-300 else min(max(end, -1e300), 1e300) for end in (low, high))
    size = max(abs(low), abs(high))
    if high - low <= size * 1e-9:
        low, high = low - (size or 1) * 0.05, high + (size or 1) * 0.05
    rough = (high - low) / count
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    if whole:
        step = max(1.0, step)
        first, last = math.ceil(low / step), math.floor(high / step)
    else:
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def tick_texts(values: list[float]) -> list[str]:
    """The labels of an axis in one notation. If all values are small, all are written as ``2.5e-4``."""
    small = 0 < max(map(abs, values), default=0) < 1e-2
    return [_scientific(value) if small and value else tick_text(value) for value in values]


def tick_text(value: float) -> str:
    """A number alone: ``0.0003`` as ``3e-4``, ``1200`` as ``1,200``, ``12000`` as ``12k``."""
    if value == 0:
        return "0"
    size = abs(value)
    if 1e4 <= size < 1e16:
        for limit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
            if size >= limit:
                return f"{value / limit:.6g}{suffix}"
    if size < 1e-3 or size >= 1e16:
        return _scientific(value)
    return f"{value:,.6g}"


def _scientific(value: float) -> str:
    mantissa, _, power = f"{value:.3e}".partition("e")
    return f"{float(mantissa):g}e{int(power)}"


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
