# SPDX-License-Identifier: Apache-2.0
"""Parameters that a docstring describes together, ``first, second: What both are``, told apart: griffe reads one name each."""

import re
from typing import Any

import griffe

_SECTIONS = ("Args:", "Attributes:")
_GROUP = re.compile(r" {4}(?P<names>\*{0,2}\w+(?:,\s+\*{0,2}\w+)+):\s+(?P<text>\S.*)", re.DOTALL)


class GroupedParameters(griffe.Extension):
    """An extension of griffe that takes groups apart, so that every parameter has its own type and default."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = apart(obj.docstring.value)


def apart(docstring: str) -> str:
    """The docstring with an entry for every parameter or attribute. An entry is a line that is indented by four columns in
    its section, and the lines after it that are indented by more; names and text may go over several lines."""
    lines: list[str] = []
    entry: list[str] = []
    inside = False
    for line in [*docstring.splitlines(), ""]:
        starts = inside and line.startswith("    ") and not line.startswith("     ")
        ends = inside and bool(line) and not line.startswith(" ")
        if (starts or ends or not inside) and entry:
            lines += _each(entry)
            entry = []
        inside = line in _SECTIONS or (inside and not ends)
        (entry if starts or entry else lines).append(line)
    return "\n".join([*lines, *_each(entry)]).rstrip()


def _each(entry: list[str]) -> list[str]:
    text = "\n".join(entry).rstrip()
    group = _GROUP.fullmatch(text)
    if group is None:
        return entry
    blank = [""] * (len(entry) - len(text.splitlines()))
    each = [f"    {name}: {group['text']}" for name in re.split(r",\s+", group["names"])]
    return "\n".join(each).splitlines() + blank
