# SPDX-License-Identifier: Apache-2.0
"""Commands and lines of Python broken to fit the columns of a page."""

import re

COLUMNS = 80
"""The longest line of a block of code on a page: what a column of the site and a terminal show."""


def wrapped(line: str, prompt: str = "") -> list[str]:
    """A command, or a line of Python after the prompt ``>>>``, in lines that do the same.

    A command is broken between its words and, in a word in quotes, after commas. Python is broken after commas.
    """
    python, indent = prompt.startswith(">>>"), "...     " if prompt.startswith(">>>") else "    "
    pieces: list[tuple[str, str]] = []  # text that isn't broken, and what ends a line behind it
    for word in re.split(r"(?<=,) ", line) if python else re.findall(r"(?:'[^']*'|[^\s'])+", line):
        *parts, last = re.split(r"(?<=,)", word) if "'" in word and len(word) > COLUMNS // 2 and not python else [word]
        pieces += [*((part, "") for part in parts), (last, "" if python else " \\")]
    rows, behind = [prompt], ""
    for text, end in pieces:
        space = " " if (behind or python) and rows[-1] not in (prompt, indent) else ""
        if len(rows[-1] + space + text + end) > COLUMNS and rows[-1] != prompt:
            rows[-1] += behind
            rows.append(indent)
            space = ""
        rows[-1] += space + text
        behind = end
    return rows
