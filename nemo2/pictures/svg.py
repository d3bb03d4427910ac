# SPDX-License-Identifier: Apache-2.0
"""SVG as text: a canvas of rectangles, lines and words, its colors, and round numbers for axes.

A picture is a string for an HTML page, whose style comes from `nemo2.pictures.page`, or for a file of its own
(`standalone`). Colors have names, so that one stylesheet serves light and dark pages.
"""

import math
from html import escape
from typing import Literal

COLOURS = ("c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7")
"""Eight fills that differ in hue and lightness. Words in ``ink`` are legible on each of them, in both themes."""

Anchor = Literal["start", "middle", "end"]

SMALLEST_TEXT = 11
"""The smallest size of text, in CSS pixels. A page that is too narrow for a picture scrolls it instead of shrinking it."""

STYLE = """
.chart,.picture{--ink:#1f2328;--soft:#59636e;--grid:#e1e5ea;--card:#e9ecf0;--a:#0b6bcb;--b:#c2410c;--bad:#b3261e;
--c0:#9ec9f5;--c1:#b5dea6;--c2:#f7c38f;--c3:#d3bff2;--c4:#f2b3c5;--c5:#94dbd3;--c6:#efdf86;--c7:#c9ced4;
font:12px system-ui,-apple-system,"Segoe UI","DejaVu Sans",sans-serif}
.picture .halo{paint-order:stroke;stroke:var(--ground,#fff);stroke-width:3px;stroke-linejoin:round}
.chart .mark{stroke:var(--soft);stroke-width:1;stroke-dasharray:4 3}.chart .again{fill:var(--soft);fill-opacity:.12}
@media(prefers-color-scheme:dark){.chart,.picture{--ink:#e6e8eb;--soft:#9aa4af;--grid:#323941;--card:#2a3038;--a:#63b3ff;
--b:#ff9d66;--bad:#ff8a80;--c0:#24588f;--c1:#3a6b33;--c2:#8f5217;--c3:#5d4696;--c4:#8a3554;--c5:#1d6a66;--c6:#75671a;
--c7:#505760}}
.chart text{fill:var(--soft)}.chart .label{font-weight:600}
.chart .grid{stroke:var(--grid);stroke-width:1}.chart .axis{stroke:var(--soft);stroke-width:1}
.chart .line{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}.chart .raw{stroke-width:1;opacity:.35}
.chart .s0{stroke:var(--a)}.chart .s1{stroke:var(--b)}.chart text.s0{fill:var(--a);stroke:none}
.chart text.s1{fill:var(--b);stroke:none}.chart circle.s0{fill:var(--a)}.chart circle.s1{fill:var(--b)}
.chart .hit{fill:transparent}.chart .hit:hover{fill:var(--soft);fill-opacity:.14}
.picture .c0{fill:var(--c0)}.picture .c1{fill:var(--c1)}.picture .c2{fill:var(--c2)}.picture .c3{fill:var(--c3)}
.picture .c4{fill:var(--c4)}.picture .c5{fill:var(--c5)}.picture .c6{fill:var(--c6)}.picture .c7{fill:var(--c7)}
.picture .ink{fill:var(--ink)}.picture .soft{fill:var(--soft)}.picture .card{fill:var(--card)}.picture .grid{fill:var(--grid)}
.picture .accent{fill:var(--a)}.picture .bad{fill:var(--bad)}.picture .none{fill:none}
.picture .tint{fill:var(--bad);fill-opacity:.16}
.picture .edge{stroke:var(--soft);stroke-width:1}.picture .frame{stroke:var(--ink);stroke-width:1.6}
.picture line{stroke:var(--grid);stroke-width:1}.picture line.soft{stroke:var(--soft)}.picture line.ink{stroke:var(--ink)}
.picture line.bad{stroke:var(--bad);stroke-width:1.6}.picture line.accent{stroke:var(--a);stroke-width:1.6}
.picture .strong{font-weight:600}.picture .dark{filter:brightness(.82) saturate(1.25)}
.picture rect:hover,.picture circle:hover{fill-opacity:.75}
"""


class Canvas:
    """A picture that is drawn piece by piece. Later pieces cover earlier ones.

    Lengths are in CSS pixels at the picture's natural size. Fills are the names in `COLOURS`, or
    ``ink soft card grid accent bad tint none``.

    Args:
        width, height: The size of the whole picture. ``height`` may be set again before `render`.
        title: The subject of the picture, which is also its accessible name.
        description: A longer description for screen readers.
    """

    def __init__(self, width: float, height: float, *, title: str, description: str = "") -> None:
        self.width, self.height = width, height
        self.title, self.description = title, description
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
        outline: Literal["", "edge", "frame"] = "",
        dark: bool = False,
    ) -> None:
        """Draw a rectangle. ``tip`` is shown under the pointer. The outline "edge" is thin and soft, "frame" thick and dark."""
        names = " ".join(filter(None, (fill, outline, "dark" if dark else "")))
        rounded = f' rx="{_number(radius)}"' if radius else ""
        self._parts.append(
            f'<rect class="{names}" x="{_number(x)}" y="{_number(y)}" width="{_number(max(width, 0))}" '
            f'height="{_number(max(height, 0))}"{rounded}{_close("rect", tip)}'
        )

    def circle(
        self, x: float, y: float, radius: float, fill: str = "c0", *, tip: str = "", outline: bool = False
    ) -> None:
        names = f"{fill} edge" if outline else fill
        self._parts.append(
            f'<circle class="{names}" cx="{_number(x)}" cy="{_number(y)}" r="{_number(radius)}"{_close("circle", tip)}'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, tone: str = "grid", *, dashed: bool = False) -> None:
        """Draw a line in one of the tones ``grid soft ink accent bad``."""
        dashes = ' stroke-dasharray="4 3"' if dashed else ""
        points = f'x1="{_number(x1)}" y1="{_number(y1)}" x2="{_number(x2)}" y2="{_number(y2)}"'
        self._parts.append(f'<line class="{tone}" {points}{dashes}/>')

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
        points = " ".join(f"{_number(x)},{_number(y)}" for x, y in corners)
        self._parts.append(f'<polygon class="{tone}" points="{points}"/>')

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
        halo: bool = False,
        tip: str = "",
    ) -> None:
        """Draw words whose baseline starts, is centered or ends at ``(x, y)``. With ``halo`` a gap separates them from lines
        below."""
        names = " ".join(filter(None, (tone, "strong" if strong else "", "halo" if halo else "")))
        placed = "" if anchor == "start" else f' text-anchor="{anchor}"'
        sized = "" if size == 12 else f' font-size="{_number(size)}"'
        title = f"<title>{escape(tip)}</title>" if tip else ""
        self._parts.append(
            f'<text class="{names}" x="{_number(x)}" y="{_number(y)}"{placed}{sized}>{title}{escape(str(words))}</text>'
        )

    def place(self, picture: "Canvas", x: float, y: float) -> None:
        """Draw another picture at its natural size with its upper left corner at ``(x, y)``."""
        self._parts.append(f'<g transform="translate({_number(x)} {_number(y)})">{"".join(picture._parts)}</g>')

    def render(self) -> str:
        """The picture as an ``<svg class="picture">`` element."""
        described = f"<desc>{escape(self.description)}</desc>" if self.description else ""
        return (
            f'<svg class="picture" xmlns="http://www.w3.org/2000/svg" {natural_size(self.width, self.height)} role="img" '
            f'aria-label="{escape(self.title)}"><title>{escape(self.title)}</title>'
            f"{described}{''.join(self._parts)}</svg>"
        )


def natural_size(width: float, height: float, *, smallest: float = SMALLEST_TEXT) -> str:
    """The attributes of a picture's size. A page may enlarge the picture, or shrink it until text of ``smallest`` px has
    11 px."""
    least = math.ceil(width * SMALLEST_TEXT / smallest)
    w, h = _number(width), _number(height)
    return f'viewBox="0 0 {w} {h}" width="{w}" height="{h}" style="min-width:{least}px"'


def legend(canvas: Canvas, x: float, y: float, entries: list[tuple[str, str]], *, gap: float = 18) -> float:
    """Draw swatches and words in a row that starts at ``(x, y)``, with ``y`` the words' baseline. Returns the row's end."""
    for fill, words in entries:
        canvas.rect(x, y - 10, 12, 12, fill.removesuffix("*"), radius=2, dark=fill.endswith("*"))
        canvas.text(x + 17, y, words)
        x += 17 + text_width(words) + gap
    return x - gap


def stack(pictures: list[Canvas], *, title: str, gap: float = 28) -> Canvas:
    """The pictures stacked vertically in one picture."""
    whole = Canvas(max(one.width for one in pictures), 0, title=title)
    whole.description = "; ".join(one.title for one in pictures)
    y = 0.0
    for one in pictures:
        whole.place(one, 0, y)
        y += one.height + gap
    whole.height = y - gap
    return whole


def standalone(picture: str) -> str:
    """``picture`` as the text of an ``.svg`` file: its own style, and a background that follows the viewer's theme."""
    background = (
        "svg{background:#fff;--ground:#fff}@media(prefers-color-scheme:dark){svg{background:#14171b;--ground:#14171b}}"
    )
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


def _close(tag: str, tip: str) -> str:
    return f"><title>{escape(tip)}</title></{tag}>" if tip else "/>"
