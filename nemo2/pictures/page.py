# SPDX-License-Identifier: Apache-2.0
"""A self-contained HTML page, readable from a disk, in light and dark, without scripts or external files.

A page is a title and sections. A section is text that the functions here make: `figure`, `table`, `cards`, `passages`,
`paragraph`. They escape their arguments; pictures (`nemo2.pictures.svg`) are inserted unchanged.
"""

import math
import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from nemo2.pictures.svg import STYLE

PAGE_STYLE = """
:root{color-scheme:light dark;--page:#fff;--card:#f6f7f9;--line:#e1e4e8;--ink:#1f2328;--soft:#59636e}
@media(prefers-color-scheme:dark){:root{--page:#14171b;--card:#1c2026;--line:#2f353d;--ink:#e6e8eb;--soft:#9aa4af}}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,sans-serif}
main{max-width:1080px;margin:0 auto;padding:32px 20px 64px}main.wide{max-width:none}
h1{font-size:26px;margin:0;overflow-wrap:anywhere}h1+.cards,h1+figure{margin-top:18px}h2{font-size:17px;margin:36px 0 12px}
.sub{color:var(--soft);margin:2px 0 22px;overflow-wrap:anywhere}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px}
.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 14px}
.card b{display:block;font-size:21px;font-variant-numeric:tabular-nums}.card span{color:var(--soft);font-size:13px}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(500px,100%),1fr));gap:14px}.charts .wide{grid-column:1/-1}
figure{--ground:var(--card);margin:0 0 14px;background:var(--card);border:1px solid var(--line);border-radius:10px;
padding:12px 10px 4px;min-width:0}.charts figure{margin:0}
figcaption{font-weight:600;padding:0 6px 4px}figure svg{width:100%;height:auto;display:block}
/* Pictures and tables scroll on narrow pages, because nobody could read them scaled down or cut off. */
figure .scroll{overflow-x:auto}figure .natural svg{width:auto;max-width:none}
.tables{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(330px,100%),1fr));gap:14px}.tables>div{min-width:0}
table{border-collapse:collapse;width:100%;font-size:14px}td,th{padding:4px 8px;border-bottom:1px solid var(--line)}
th{text-align:left;font-weight:600}td{vertical-align:top;overflow-wrap:break-word}.tables td{overflow-wrap:anywhere}
.tables td:first-child{overflow-wrap:break-word}td.number,th.number{text-align:right;font-variant-numeric:tabular-nums}
td.number{white-space:nowrap}
td:first-child{color:var(--soft);white-space:nowrap}.plain td:first-child{color:inherit;white-space:normal}
details{margin:10px 0;border:1px solid var(--line);border-radius:10px;background:var(--card)}
summary{cursor:pointer;padding:8px 14px;font-weight:600}
pre{margin:0;padding:6px 14px 14px;overflow:auto;font-size:12.5px;line-height:1.45}
.passages{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(300px,100%),1fr));gap:14px}
.passages article{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 14px;min-width:0}
.passages h3{font-size:14px;margin:0 0 8px;overflow-wrap:anywhere}
.passages p{white-space:pre-wrap;overflow-wrap:anywhere;margin:0 0 8px;font:13px/1.5 ui-monospace,monospace}
.passages i{font-style:normal;color:var(--soft)}.passages small{color:var(--soft)}
@media(max-width:700px){table{display:block;overflow-x:auto}td.long{min-width:15em}}
"""


def page(title: str, *sections: str, subtitle: str = "", wide: bool = False) -> str:
    """The page as text. ``sections`` are HTML. With ``wide`` they are as wide as the window."""
    below = f"<p class='sub'>{escape(subtitle)}</p>" if subtitle else ""
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width,initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{PAGE_STYLE}{STYLE}</style></head>"
        f"<body><main{' class=wide' if wide else ''}><h1>{escape(title)}</h1>{below}{''.join(sections)}</main></body></html>\n"
    )


def section(title: str, *parts: str) -> str:
    return f"<h2>{escape(title)}</h2>{''.join(parts)}"


def paragraph(words: str) -> str:
    """A paragraph. Text between backticks becomes code."""
    text = re.sub("`([^`]+)`", r"<code>\1</code>", escape(words))
    return f"<p>{text}</p>"


def figure(picture: str, caption: str, *, natural_size: bool = False) -> str:
    """A picture with its caption, as wide as the page. With ``natural_size`` it is never enlarged."""
    kind = "scroll natural" if natural_size else "scroll"
    return f"<figure><figcaption>{escape(caption)}</figcaption><div class='{kind}'>{picture}</div></figure>"


def figures(pictures: Iterable[tuple[str, str, bool]]) -> str:
    """Pictures side by side if the page is wide enough, each as (caption, picture, whether it takes a whole row)."""
    body = "".join(
        f"<figure class='{'wide' if wide else ''}'><figcaption>{escape(caption)}</figcaption>"
        f"<div class='scroll'>{picture}</div></figure>"
        for caption, picture, wide in pictures
    )
    return f"<div class='charts'>{body}</div>"


def cards(values: Iterable[tuple[str, str]]) -> str:
    """Key figures: a value and its name."""
    body = "".join(
        f"<div class='card'><b>{escape(value)}</b><span>{escape(name)}</span></div>" for value, name in values
    )
    return f"<div class='cards'>{body}</div>"


def passages(columns: Iterable[tuple[str, str, str, str]]) -> str:
    """Texts side by side if the page is wide enough, each as (name, prompt, continuation, remark)."""
    body = "".join(
        f"<article><h3>{escape(name)}</h3><p><i>{escape(given)}</i>{escape(text)}</p><small>{escape(remark)}</small></article>"
        for name, given, text, remark in columns
    )
    return f"<div class='passages'>{body}</div>"


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table. Columns of numbers, with or without units, are right-aligned.

    Integers have thousands separators. Fractions of a column have the places with which its largest has four digits.
    """
    rows = [list(row) for row in rows]
    cells = list(zip(*(_column(column) for column in zip(*rows, strict=True)), strict=True))
    right = [bool(rows) and _of_numbers([row[column] for row in rows]) for column in range(len(head))]
    names = "".join(f"<th{_align(number)}>{escape(name)}</th>" for name, number in zip(head, right, strict=True))
    body = "".join(
        f"<tr>{''.join(f'<td{_align(number, text)}>{escape(text)}</td>' for text, number in zip(row, right, strict=True))}</tr>"
        for row in cells
    )
    return f"<table class='plain'><tr>{names}</tr>{body}</table>"


def _align(number: bool, text: str = "") -> str:
    if number:
        return " class='number'"
    return " class='long'" if len(text) > _LONG else ""


_LONG = 40
"""A cell with more characters gets room for a few words a line on a narrow page. Otherwise it has one word a line."""


_NUMBER = re.compile(
    r"[-+–~<>]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?( ?(%|[A-Za-z][A-Za-z/]{0,6}))?( (of|in) \d[\d,.]*( [A-Za-z]{1,6})?)?"
)
"""A number as our pages write it: ``1,234``, ``3.2%``, ``0.5 s``, ``40 of 100``, ``1.25 in 64``."""
_NONE = ("", "-", "–")


def _of_numbers(values: Sequence[Any]) -> bool:
    told = [value for value in values if not (isinstance(value, str) and value in _NONE)]
    return bool(told) and all(
        isinstance(value, int | float) and not isinstance(value, bool) or bool(_NUMBER.fullmatch(str(value)))
        for value in told
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
