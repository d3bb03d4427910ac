# SPDX-License-Identifier: Apache-2.0
"""A self-contained HTML page, readable from a disk, in light and dark, without scripts or external files.

A page is a title and sections. A section is text that the functions here make, by the templates of ``page.html``. They
escape their arguments; pictures (`nemo2.report.pictures.svg`) are inserted unchanged.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

_LONG = 40
"""A cell with more characters gets room for a few words a line on a narrow page. Otherwise it has one word a line."""

_PHONE = 328
"""The pixels inside a figure on a phone of 390 pixels."""


@cache
def _template() -> Any:
    from jinja2 import Environment, FileSystemLoader

    environment = Environment(autoescape=True, loader=FileSystemLoader(Path(__file__).parent))
    return environment.get_template("page.html").module


def page(title: str, *sections: str, subtitle: str = "", wide: bool = False) -> str:
    """The page as text. ``sections`` are HTML. With ``wide`` they are as wide as the window."""
    return _template().page(title, sections, subtitle, wide)


def section(title: str, *parts: str) -> str:
    return _template().section(title, parts)


def paragraph(words: str) -> str:
    """A paragraph. Text between backticks becomes code."""
    pieces = re.split("`([^`]+)`", words)
    return _template().paragraph([(piece, index % 2 == 1) for index, piece in enumerate(pieces)])


def note(words: str) -> str:
    """A paragraph in a soft color."""
    return _template().note(words)


def listing(items: Iterable[str]) -> str:
    return _template().listing(items)


def figure(picture: str, caption: str, *, natural_size: bool = False) -> str:
    """A picture with its caption, as wide as the page. With ``natural_size`` it is never enlarged."""
    return _template().figure(picture, caption, natural_size)


def fitting(draw: Callable[[int], str], width: int) -> str:
    """A picture drawn twice, of which the page shows the one that fits: ``width`` pixels wide, and as wide as a phone."""
    return _template().fitting(draw(width), draw(_PHONE))


def figures(pictures: Iterable[tuple[str, str, bool]]) -> str:
    """Pictures side by side if the page is wide enough, each as (caption, picture, whether it takes a whole row)."""
    return _template().figures(pictures)


def cards(values: Iterable[tuple[str, str]]) -> str:
    """Key figures: a value and its name."""
    return _template().cards(values)


def passages(columns: Iterable[tuple[str, str, str, str]]) -> str:
    """Texts side by side if the page is wide enough, each as (name, prompt, continuation, remark)."""
    return _template().passages(columns)


def pairs(tables: Iterable[tuple[str, Sequence[tuple[str, Any]]]]) -> str:
    """Tables of names and values side by side if the page is wide enough, each with its title. "": no title."""
    return _template().pairs(tables)


def details(title: str, file: str, text: str) -> str:
    """The text of a file, which a reader opens."""
    return _template().details(title, file, text)


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table. Columns of numbers, with or without units, are right-aligned.

    Integers have thousands separators. Fractions of a column have the places with which its largest has four digits.
    """
    rows = [list(row) for row in rows]
    cells = list(zip(*(_column(column) for column in zip(*rows, strict=True)), strict=True))
    right = [bool(rows) and _of_numbers([row[column] for row in rows]) for column in range(len(head))]
    return _template().table(head, cells, right, _LONG)


_NUMBER = re.compile(
    r"[-+–~<>]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?( ?(%|[A-Za-z][A-Za-z/]{0,6}))?( (of|in) \d[\d,.]*( [A-Za-z]{1,6})?)?"
)
"""A number as our pages write it: ``1,234``, ``3.2%``, ``0.5 s``, ``40 of 100``, ``1.25 in 64``."""
_NONE = ("", "-", "–")


def _of_numbers(values: Sequence[Any]) -> bool:
    numbers = [value for value in values if not (isinstance(value, str) and value in _NONE)]
    return bool(numbers) and all(
        isinstance(value, int | float) and not isinstance(value, bool) or bool(_NUMBER.fullmatch(str(value)))
        for value in numbers
    )


def _column(values: Sequence[Any]) -> list[str]:
    """The cells of a column; its fractions have the same number of places."""
    fractions = [abs(value) for value in values if isinstance(value, float) and math.isfinite(value) and value]
    places = 0
    if fractions:
        places = max(0, 3 - math.floor(math.log10(max(fractions))))
        # Up to two more places, so that the smallest isn't written as 0.
        places = min(max(places, -math.floor(math.log10(min(fractions)))), places + 2, 8)
    return [_text(value, places) for value in values]


def _text(value: Any, places: int) -> str:
    if isinstance(value, float):
        return f"{value:,.{places}f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
