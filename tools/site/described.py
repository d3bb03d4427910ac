# SPDX-License-Identifier: Apache-2.0
"""Docstrings with a description for every parameter, as mkdocstrings' tables need them. An extension of griffe.

Parameters that a docstring describes together, ``first, second: What both are``, are separated: griffe reads one name
each. A parameter that a class or function doesn't describe itself takes the description of a base class, of the
docstring of the module, or of the class or function whose arguments the docstring refers to ("The arguments are those of
`train`").
"""

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import griffe

_SECTIONS = ("Args:", "Attributes:")
_OTHER_SECTIONS = ("Raises:", "Returns:", "Yields:", "Example:", "Examples:", "Note:")
_GROUP = re.compile(r" {4}(?P<names>\*{0,2}\w+(?:,\s+\*{0,2}\w+)+):\s+(?P<text>\S.*)", re.DOTALL)
_ONE = re.compile(r" {4}(?P<name>\*{0,2}\w+)(?: \(.*?\))?:\s+(?P<text>\S.*)", re.DOTALL)
_THOSE_OF = re.compile(r"(?:[Aa]rguments|[Pp]arameters|Those)\b[^.`]*\bthose\s+of\s+`(?P<name>[\w.]+)`")
_TERM = re.compile(r"^(?P<names>``\w+``(?:, ``\w+``)*)\n(?P<text>(?: {4}\S.*\n?)+)", re.MULTILINE)


class DescribedParameters(griffe.Extension):
    """An extension of griffe that gives every parameter its own description, type and default."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = apart(obj.docstring.value)
            of_module = obj.parent is not None and obj.parent.is_module
            if of_module and (obj.is_class or obj.is_function) and obj.path.startswith("nemo2."):
                found = getattr(import_module(obj.path.rpartition(".")[0]), obj.name, None)
                if inspect.isclass(found) or inspect.isfunction(found):
                    obj.docstring.value = completed(obj.docstring.value, found)


def completed(docstring: str, of: Callable[..., Any]) -> str:
    """The docstring of a class or function with the descriptions that its parameters inherit. The section of arguments
    then has every parameter, in the order of the signature."""
    own, found = own_descriptions(docstring, of), descriptions(of)
    if found.keys() <= own.keys():
        return docstring
    arguments = described(docstring, ("Args:",))
    elsewhere = described(docstring, ("Attributes:",))
    listed = {name: text for name, text in {**found, **arguments}.items() if name in arguments or name not in elsewhere}
    lines = [f"    {name}: {text}" for name, text in listed.items()]
    before, after = _around_arguments(docstring.splitlines())
    return "\n".join([*before, "", "Args:", *lines, *([""] if after else []), *after])


def own_descriptions(docstring: str, of: Callable[..., Any]) -> dict[str, str]:
    """The parameters that a class or function with this docstring describes itself."""
    of_class = {**described(of.__init__.__doc__ or ""), **_fields(of)} if inspect.isclass(of) else {}
    return {**described(docstring), **of_class}


def descriptions(of: Callable[..., Any]) -> dict[str, str]:
    """The description of each parameter of a class or function, by the first of these that has one: itself, a base class,
    a module of these classes, a class or function that a docstring refers to."""
    try:
        parameters = inspect.signature(of).parameters
    except (TypeError, ValueError):
        return {}
    found: dict[str, str] = {}
    lines = [one for one in inspect.getmro(of) if one.__module__.startswith("nemo2")] if inspect.isclass(of) else [of]
    for one in lines:
        found = {**own_descriptions(one.__doc__ or "", one), **found}
    for one in lines:
        found = {**_terms(one.__module__), **found}
    for one in lines:
        for other in _referred(one):
            found = {**descriptions(other), **found}
    return {name: found[name] for name in parameters if name in found}


def _referred(of: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """The classes and functions whose arguments the docstring refers to."""
    for match in _THOSE_OF.finditer(of.__doc__ or ""):
        home, _, name = match["name"].rpartition(".")
        found = getattr(import_module(home or of.__module__), name, None)
        if found is not None:  # a base class need not be imported
            yield found


def described(docstring: str, sections: tuple[str, ...] = _SECTIONS) -> dict[str, str]:
    """The descriptions in a docstring's sections of arguments, each as one line."""
    found, inside = {}, False
    entry: list[str] = []
    for line in [*apart(inspect.cleandoc(docstring)).splitlines(), "."]:
        if entry and not line.startswith("     "):
            if match := _ONE.fullmatch("\n".join(entry).rstrip()):
                found[match["name"].lstrip("*")] = " ".join(match["text"].split())
            entry = []
        if line and not line.startswith(" "):
            inside = line in sections
        elif inside and line:
            entry.append(line)
    return found


@functools.cache
def _fields(of: Callable[..., Any]) -> dict[str, str]:
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


def _around_arguments(lines: list[str]) -> tuple[list[str], list[str]]:
    """The lines before the section of arguments, or before its place, and the sections that follow."""
    start = next((number for number, line in enumerate(lines) if line in ("Args:", *_OTHER_SECTIONS)), len(lines))
    end = start
    if lines[start : start + 1] == ["Args:"]:
        end = next((n for n in range(start + 1, len(lines)) if lines[n] and not lines[n].startswith(" ")), len(lines))
    before = lines[:start]
    while before and not before[-1].strip():
        before.pop()
    return before, lines[end:]


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
