# SPDX-License-Identifier: Apache-2.0
"""Docstrings with a description for every parameter, as mkdocstrings' tables need them. An extension of griffe.

Parameters that a docstring describes together, ``first, second: What both are``, are separated: griffe reads one name
each. A parameter that a class doesn't describe itself takes the description of a base class, or of the docstring of the
class's module.
"""

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import griffe

_SECTIONS = ("Args:", "Attributes:")
_OTHER_SECTIONS = ("Raises:", "Returns:", "Yields:", "Example:", "Examples:", "Note:")
_GROUP = re.compile(r" {4}(?P<names>\*{0,2}\w+(?:,\s+\*{0,2}\w+)+):\s+(?P<text>\S.*)", re.DOTALL)
_ONE = re.compile(r" {4}(?P<name>\*{0,2}\w+)(?: \(.*?\))?:\s+(?P<text>\S.*)", re.DOTALL)
_TERM = re.compile(r"^(?P<names>``\w+``(?:, ``\w+``)*)\n(?P<text>(?: {4}\S.*\n?)+)", re.MULTILINE)


class DescribedParameters(griffe.Extension):
    """An extension of griffe that gives every parameter its own description, type and default."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = apart(obj.docstring.value)
            if obj.is_class and obj.path.startswith("nemo2."):
                found = getattr(import_module(obj.path.rpartition(".")[0]), obj.name, None)
                if inspect.isclass(found):
                    obj.docstring.value = completed(obj.docstring.value, found)


def completed(docstring: str, of: type) -> str:
    """The docstring of a class with the descriptions that its parameters inherit."""
    own = {**described(docstring), **described(of.__init__.__doc__ or ""), **_fields(of)}
    inherited = {name: text for name, text in inherited_descriptions(of).items() if name not in own}
    if not inherited:
        return docstring
    lines = [f"    {name}: {text}" for name, text in inherited.items()]
    before, sections = _before_sections(docstring.splitlines())
    head = [] if "Args:" in before else ["", "Args:"]
    return "\n".join([*before, *head, *lines, *([""] if sections else []), *sections])


def inherited_descriptions(of: type) -> dict[str, str]:
    """The parameters of a class that a base class or the docstring of a module of these classes describes."""
    try:
        parameters = inspect.signature(of).parameters
    except (TypeError, ValueError):
        return {}
    found: dict[str, str] = {}
    for base in of.__mro__[1:]:
        if base.__module__.startswith("nemo2"):
            found = {
                **described(base.__doc__ or ""),
                **described(base.__init__.__doc__ or ""),
                **_fields(base),
                **found,
            }
    for one in of.__mro__:
        if one.__module__.startswith("nemo2"):
            found = {**_terms(one.__module__), **found}
    return {name: found[name] for name in parameters if name in found}


def described(docstring: str) -> dict[str, str]:
    """The descriptions in a docstring's section of arguments, each as one line."""
    found, inside = {}, False
    entry: list[str] = []
    for line in [*apart(inspect.cleandoc(docstring)).splitlines(), "."]:
        if entry and not line.startswith("     "):
            if match := _ONE.fullmatch("\n".join(entry).rstrip()):
                found[match["name"].lstrip("*")] = " ".join(match["text"].split())
            entry = []
        if line and not line.startswith(" "):
            inside = line in _SECTIONS
        elif inside and line:
            entry.append(line)
    return found


@functools.cache
def _fields(of: type) -> dict[str, str]:
    """The docstrings below the fields of a class."""
    try:
        [parsed] = ast.parse(textwrap.dedent(inspect.getsource(of))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return {}
    body = getattr(parsed, "body", [])
    return dict(_field_docstrings(body))


def _field_docstrings(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for field, below in zip(body, body[1:], strict=False):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, " ".join(text.split())


@functools.cache
def _terms(module: str) -> dict[str, str]:
    """The parameters that a module's docstring describes: a line of names, and indented lines below."""
    found = {}
    for match in _TERM.finditer((import_module(module).__doc__ or "") + "\n"):
        for name in re.findall(r"\w+", match["names"]):
            found[name] = " ".join(match["text"].split())
    return found


def _before_sections(lines: list[str]) -> tuple[list[str], list[str]]:
    """The lines up to the end of the arguments, and the sections that follow them."""
    at = next((number for number, line in enumerate(lines) if line in _OTHER_SECTIONS), len(lines))
    if "Args:" in lines:
        start = lines.index("Args:") + 1
        at = next((n for n in range(start, len(lines)) if lines[n] and not lines[n].startswith(" ")), len(lines))
    before = lines[:at]
    while before and not before[-1].strip():
        before.pop()
    return before, lines[at:]


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
