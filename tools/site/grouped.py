# SPDX-License-Identifier: Apache-2.0
"""Parameters that a docstring describes together, ``first, second: What both are``, told apart: griffe reads one name each."""

import re
from typing import Any

import griffe

_SECTION = re.compile(r"^(?P<indent> *)Args:$")


class GroupedParameters(griffe.Extension):
    """An extension of griffe that takes groups apart, so that every parameter has its own type and default."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = apart(obj.docstring.value)


def apart(docstring: str) -> str:
    """The docstring with an entry for every parameter. An entry is a line that is indented by four columns in ``Args:``."""
    lines: list[str] = []
    entry: list[str] = []
    inside = False
    for line in [*docstring.splitlines(), ""]:
        starts = inside and line.startswith("    ") and not line.startswith("     ")
        ends = inside and bool(line) and not line.startswith(" ")
        if (starts or ends or not inside) and entry:
            lines += _each(entry)
            entry = []
        inside = not ends and (inside or bool(_SECTION.match(line)))
        (entry if starts or entry else lines).append(line)
    return "\n".join([*lines, *_each(entry)]).rstrip()


def _each(entry: list[str]) -> list[str]:
    names, colon, text = entry[0].strip().partition(": ") if entry else ("", "", "")
    if not colon or ", " not in names or not all(re.fullmatch(r"\*{0,2}\w+", name) for name in names.split(", ")):
        return entry
    return [line for name in names.split(", ") for line in (f"    {name}: {text}", *entry[1:])]
