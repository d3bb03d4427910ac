# SPDX-License-Identifier: Apache-2.0
"""Translates the code cells of a notebook together, so that a cell may use the imports of an earlier one.

Magics and shell lines are kept. A cell with a magic of another language is left alone.
"""

import ast
import json
import re
from collections.abc import Callable
from typing import Any

from nemo2.base.errors import ConfigError

_PYTHON_CELLS = re.compile(r"%%(time|timeit|capture|prun)\b|%%writefile\s+\S+\.py\b")
"""First lines of cells whose other lines are Python."""
_SPECIAL = re.compile(r"\s*([%!?]|[\w.]+\s*=\s*[%!])|.*\?\s*$")
_KEPT = "pass  # nemo2 translate keeps line "
_CELL = "# nemo2 translate begins cell "

Lines = list[tuple[str, str]]
"""Places in the notebook ("cell 3, line 2") with what is said about them."""


def translated_notebook(text: str, translate: Callable[[str], Any]) -> tuple[str, Lines, Lines]:
    """The notebook with its code cells translated, the lines to edit, and the lines from which something was removed.

    Args:
        translate: `nemo2.from_nemo.script.translated`.

    Raises:
        ConfigError: the text is no notebook.
    """
    try:
        notebook = json.loads(text)
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        sources = ["".join(cell["source"]) for cell in cells]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"this is no notebook: {error!r}.") from None
    masked_lines: list[str] = []
    left: Lines = []
    joined: list[str] = []
    places: list[str] = []
    for number, source in enumerate(sources, start=1):
        lines = _masked(source, masked_lines)
        try:
            ast.parse("\n".join(lines or []))
        except SyntaxError as error:
            left.append((f"cell {number}, line {error.lineno}", "can't be read as Python; the cell is left as it is"))
            lines = None
        joined += [f"{_CELL}{number}", *(lines or [])]
        places += [f"cell {number}", *(f"cell {number}, line {line}" for line in range(1, len(lines or []) + 1))]
        if lines is None:
            cells[number - 1] = None
    done = translate("\n".join(joined) + "\n")
    for part in done.text.split(_CELL)[1:]:
        head, _, body = part.partition("\n")
        cell = cells[int(head) - 1]
        if cell is not None:
            cell["source"] = _unmasked(body.removesuffix("\n"), masked_lines).splitlines(keepends=True)
    left += [(places[line - 1], message) for line, message in done.left]
    taken_out = [(places[line - 1], message) for line, message in done.taken_out]
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", left, taken_out


def _masked(source: str, masked_lines: list[str]) -> list[str] | None:
    """The lines of a cell as Python: magics and shell lines become ``pass``. None: the cell isn't Python."""
    lines = source.split("\n")
    if source.startswith("%%") and not _PYTHON_CELLS.match(source):
        return None
    masked, goes_on, indent = [], False, ""
    for line in lines:
        if goes_on or (_SPECIAL.match(line) and not line.lstrip().startswith("#")):
            indent = indent if goes_on else line[: len(line) - len(line.lstrip())]
            masked.append(f"{indent}{_KEPT}{len(masked_lines)}")
            masked_lines.append(line)
            goes_on = line.endswith("\\")
        else:
            masked.append(line)
    return masked


def _unmasked(body: str, masked_lines: list[str]) -> str:
    return re.sub(
        rf"^[ \t]*{re.escape(_KEPT)}(\d+)$", lambda match: masked_lines[int(match[1])], body, flags=re.MULTILINE
    )
