# SPDX-License-Identifier: Apache-2.0
"""Tables of text: rows of cells as aligned lines, which ``rich`` lays out, as wide as the terminal that shows them."""

import io
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, Optional

from nemo2.base.names import visible

_WIDE, _NARROW = 100_000, 20


def columns(
    rows: Iterable[Sequence[Any]],
    *,
    head: Optional[Sequence[str]] = None,
    right: Iterable[int] = (),
    least: int = 0,
    folds: int = -1,
    optional: Sequence[str] = (),
    indent: int = 0,
    width: Optional[int] = None,
    colours: bool = False,
) -> list[str]:
    """Rows as lines, with two spaces between columns.

    Every cell is printed whole. On a terminal, a row that is too long continues on the next line, in the column
    ``folds``. If that leaves no room for the column, and in a file or a pipe, a row is one line of any length, so that
    names can be copied.

    Args:
        rows: Cells as text, numbers or ``(text, style)`` with a style of rich's. A line break in a cell is kept;
            other control characters are written out (`nemo2.base.names.visible`).
        head: Names of the columns, bold with ``colours``.
        right: Indices of the columns that are right-aligned.
        least: The smallest width of the last column but one, in characters. Consecutive tables share it.
        folds: The index of the column that is folded.
        optional: Names of columns that are left out, one after another, while rows are longer than ``width``.
        indent: Spaces before each line.
        width: The longest line, in characters. None: the terminal's width, or unlimited without a terminal.
        colours: Whether styles become escape sequences.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    def shown(cell: Any) -> Text:
        text, *style = cell if isinstance(cell, tuple) else (str(cell),)
        return Text(visible(text), *style)

    cells = [[shown(cell) for cell in row] for row in rows]
    for row in cells:
        row[-2].pad_right(least - row[-2].cell_len)
    if not cells and head is None:
        return []
    if width is None:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDE
    texts = list(zip(*cells, *([map(Text, head)] if head else []), strict=True))
    widths = {place: max(one.cell_len for one in text) + 2 for place, text in enumerate(texts)}
    right, folds = set(right), folds % len(texts)
    for name in optional:
        if head and sum(widths.values()) - 2 > width - indent:
            del widths[list(head).index(name)]
    others = sum(widths.values()) - widths[folds]
    width = width - indent if others + _NARROW <= width - indent else _WIDE
    table = Table(box=None, show_header=head is not None, header_style="bold", padding=(0, 1), pad_edge=False)
    for place in widths:
        justify, title = "right" if place in right else "left", Text(head[place]) if head else ""
        table.add_column(title, justify=justify, overflow="fold", no_wrap=place != folds)
    for row in cells:
        table.add_row(*(row[place] for place in widths))
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=colours,
        force_jupyter=False,  # in a notebook, rich would also display an empty output for each table
        color_system="standard" if colours else None,
    )
    with console.capture() as captured:
        console.print(table)
    return [f"{' ' * indent}{line.rstrip()}" for line in captured.get().splitlines()]


def folded(sentence: str, *, indent: int = 2, first: int = 0) -> str:
    """A sentence, folded between words at `prose_width`. ``first`` and ``indent`` are the spaces before its first line and
    before the others."""
    return textwrap.fill(
        sentence,
        prose_width(),
        initial_indent=" " * first,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def prose_width() -> int:
    """The longest line of prose: the terminal's width, at most 120 columns; 120 in a file or a pipe.

    Rows of tables, commands and errors are whole in a file or a pipe, so that programs find them by line.
    """
    return min(shutil.get_terminal_size((120, 24)).columns, 120)
