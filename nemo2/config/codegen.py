# SPDX-License-Identifier: Apache-2.0
"""Writes a recipe as Python: a function that rebuilds exactly this tree, to be read, committed and edited.

Classes are imported from their public places rather than from where they are defined. The file is formatted, so it can
be committed unchanged.
"""

import builtins
import enum
import inspect
import keyword
import pathlib
import re
import sys
from collections.abc import Iterable
from datetime import timedelta
from importlib import import_module
from typing import Any, NamedTuple, Union

import fiddle as fdl
import nemo_run as run

from nemo2.base.errors import ConfigError
from nemo2.config import wire
from nemo2.config.provenance import is_same
from nemo2.config.serialize import check_serialisable
from nemo2.config.tree import Config, Partial
from nemo2.config.walk import children

WIDTH = 88
"""The line length that formatters use by default."""

_FRONT_DOORS = ("nemo2.llm", "nemo2", "nemo2.callbacks")
"""The public places of nemo2's names, in order of preference. Names of the first two are written ``llm.pretrain``,
``nl.Trainer``."""

_NODES = {
    Config: ("nemo2", "Config"),
    Partial: ("nemo2", "Partial"),
    run.Config: ("nemo_run", "Config"),
    run.Partial: ("nemo_run", "Partial"),
    fdl.Config: ("fiddle", "Config"),
    fdl.Partial: ("fiddle", "Partial"),
    fdl.ArgFactory: ("fiddle", "ArgFactory"),
}


class Group(NamedTuple):
    """An expression in brackets, which may be spread over lines."""

    opening: str
    items: list[tuple[str, "Expression"]]
    """The items, each with its prefix: ``"name="``, ``"'key': "`` or nothing."""
    closing: str


Expression = Union[str, Group]


class Imports:
    """The names that a piece of code uses, and the lines that import them."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._modules: set[str] = set()
        self._names: dict[tuple[str, str], str] = {}
        self._taken: set[str] = {*taken, *dir(builtins)}

    def module(self, name: str, alias: str = "") -> str:
        """Import ``name``, or ``name as alias``. Returns the name to use in the code."""
        self._modules.add(f"{name} as {alias}" if alias else name)
        self._taken.add(alias or name.partition(".")[0])
        return alias or name

    def name(self, module: str, name: str) -> str:
        """Import ``name`` from ``module``. Returns the name to use in the code, which differs from ``name`` if that is
        taken."""
        if (module, name) not in self._names:
            self._names[module, name] = self.reserve(name)
        return self._names[module, name]

    def reserve(self, name: str) -> str:
        """``name``, with a number behind it if the name is taken."""
        written, number = name, 2
        while written in self._taken or keyword.iskeyword(written):
            written, number = f"{name}_{number}", number + 1
        self._taken.add(written)
        return written

    def lines(self) -> list[str]:
        """The import statements, as isort orders them: the standard library's, then the others."""
        names: dict[str, list[tuple[str, str]]] = {}
        for (module, name), written in self._names.items():
            names.setdefault(module, []).append((name, written))
        sections: list[list[str]] = []
        for of_stdlib in (True, False):
            section = [f"import {module}" for module in sorted(self._modules) if _is_stdlib(module) == of_stdlib]
            for module in sorted((module for module in names if _is_stdlib(module) == of_stdlib), key=str.lower):
                section += _from_import(module, sorted(names[module], key=_by_kind))
            sections.append(section)
        return [line for section in sections if section for line in ("", *section)][1:]


def function_source(recipe: Any, *, name: str = "pretrain_recipe", doc: str = "", header: str = "") -> str:
    """The source of a module with a function that returns a tree equal to ``recipe``. ``doc`` and ``header``: the
    docstrings of function and module.

    Raises:
        ConfigError: a value has no textual form (the message lists all), or the tree has a value that Python source
            can't express.
    """
    check_serialisable(recipe)
    imports = Imports(taken=[name])
    writer = Writer(imports, recipe)
    returned = writer.expression(recipe)
    returns = imports.name(*_NODES[type(recipe)])
    lines = [f"def {name}() -> {returns}:"]
    lines += [f'    """{doc}"""'] if doc else []
    for variable, expression in writer.assignments():
        lines.append(f"    {variable} = {layout(expression, 4, len(variable) + 3)}")
    lines.append(f"    return {layout(returned, 4, len('return '))}")
    parts = [f'"""{header}"""'] if header else []
    parts += ["\n".join(imports.lines()), "\n" + "\n".join(lines)]
    source = "\n\n".join(parts) + "\n"
    if not same_tree(run_function(source, name), recipe):
        raise ConfigError(
            "This recipe cannot be written as Python, because the recipe that the code builds is not equal to it. "
            "Check for an object in it whose class defines no equality."
        )
    return source


def same_tree(left: Any, right: Any) -> bool:
    """Whether two trees are equal, including the types of values and the sharing between places.

    fiddle's ``==`` takes time that is quadratic in the depth and treats 1 and 1.0 as equal.
    """
    places: dict[int, int] = {}

    def same(one: Any, other: Any) -> bool:
        if type(one) is not type(other):
            return False
        if isinstance(one, fdl.Buildable | list | dict):
            if id(one) in places or id(other) in places.values():
                return places.get(id(one)) == id(other)
            places[id(one)] = id(other)
        if isinstance(one, fdl.Buildable) and one.__fn_or_cls__ is not other.__fn_or_cls__:
            return False
        mine, theirs = children(one), children(other)
        if isinstance(one, fdl.Buildable | list | tuple | dict):
            matching = dict(theirs)
            return len(mine) == len(theirs) and all(
                step in matching and same(child, matching[step]) for step, child in mine
            )
        return is_same(one, other)

    return same(left, right)


def run_function(source: str, name: str, *arguments: Any) -> Any:
    """The return value of the function ``name`` of generated source."""
    namespace: dict[str, Any] = {"__name__": "generated"}
    exec(compile(source, "<generated>", "exec"), namespace)
    return namespace[name](*arguments)


class Writer:
    """Writes the expressions for the values of one tree. A node that is used in several places becomes a variable."""

    def __init__(self, imports: Imports, *roots: Any) -> None:
        self.imports = imports
        self._shared = shared_values(*roots)
        self._variables: dict[int, str] = {}
        self._assigned: list[tuple[str, Expression]] = []

    def assignments(self) -> list[tuple[str, Expression]]:
        """The variables that the expressions so far use, in the order in which they have to be assigned."""
        return self._assigned

    def expression(self, value: Any, path: str = "recipe") -> Expression:
        """The expression for a value. ``path`` names the value in errors, and the variable of a shared value.

        Raises:
            ConfigError: Python source can't express the value.
        """
        if id(value) not in self._shared:
            return self._write(value, path)
        if id(value) not in self._variables:
            written = self._write(value, path)
            stem = (re.findall(r"[A-Za-z_]\w*", path) or ["value"])[-1]
            self._variables[id(value)] = variable = self.imports.reserve(stem)
            self._assigned.append((variable, written))
        return self._variables[id(value)]

    def _write(self, value: Any, path: str) -> Expression:
        if isinstance(value, fdl.Buildable):
            return self._node(value, path)
        if type(value) in _BRACKETS or (isinstance(value, tuple) and hasattr(value, "_fields")):
            return self._container(value, path)
        return self._leaf(value, path)

    def _node(self, node: Any, path: str) -> Expression:
        if type(node) not in _NODES:
            raise ConfigError(f"{path} is a {type(node).__qualname__}, which cannot be written as Python.")
        items: list[tuple[str, Expression]] = [("", self.reference(node.__fn_or_cls__, path))]
        odd: list[tuple[str, Expression]] = []
        for step, child in children(node):
            written = self.expression(child, f"{path}{step}")
            name = step[1:]
            if not step.startswith("."):
                items.append(("", written))
            elif not is_plain_name(name):
                odd.append((f"{quoted(name)}: ", written))
            else:
                items.append((f"{name}=", written))
        if odd:
            items.append(("**", Group("{", odd, "}")))
        return Group(f"{self.imports.name(*_NODES[type(node)])}(", items, ")")

    def _container(self, value: Any, path: str) -> Expression:
        if isinstance(value, dict):
            items = [
                (f"{flat(self._leaf(key, path))}: ", self.expression(item, f"{path}[{key!r}]"))
                for key, item in value.items()
            ]
            return Group("{", items, "}")
        if isinstance(value, set | frozenset):
            members: list[tuple[str, Expression]] = [("", self._leaf(item, path)) for item in sorted(value, key=repr)]
            braces = Group("{", members, "}")
            if not members:
                return f"{type(value).__name__}()"
            return braces if isinstance(value, set) else Group("frozenset(", [("", braces)], ")")
        items = [("", self.expression(item, f"{path}[{index}]")) for index, item in enumerate(value)]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return Group(f"{self.reference(type(value), path)}(", items, ")")
        opening, closing = _BRACKETS[type(value)]
        return Group(opening, items, closing if len(items) != 1 or opening == "[" else ",)")

    def _leaf(self, value: Any, path: str) -> str:
        if value is None or isinstance(value, bool) or value is Ellipsis:
            return repr(value)
        if name := wire.constant_name(value):
            self.imports.module("torch")
            return name
        if isinstance(value, enum.Enum):
            written = self.reference(type(value), path)
            return f"{written}.{value.name}" if value.name in type(value).__members__ else f"{written}({value.value!r})"
        if isinstance(value, type) or inspect.isroutine(value):
            return self.reference(value, path)
        if type(value) is str:
            return quoted(value)
        if type(value) is int:
            return f"{value:_}" if abs(value) >= 100_000 else str(value)
        if type(value) is float:
            return repr(value) if value - value == 0 else f'float("{value}")'
        if type(value) in (complex, bytes, slice):
            return repr(value)
        if isinstance(value, pathlib.PurePath):
            kind = "Path" if isinstance(value, pathlib.Path) else type(value).__name__
            return f"{self.imports.name('pathlib', kind)}({quoted(str(value))})"
        if isinstance(value, timedelta):
            return f"{self.imports.name('datetime', 'timedelta')}({repr(value).partition('(')[2]}"
        if type(value).__module__ == "torch" and type(value).__name__ == "device":
            self.imports.module("torch")
            return f"torch.device({quoted(str(value))})"
        raise ConfigError(f"{path} is a {type(value).__qualname__}, which cannot be written as Python.")

    def reference(self, target: Any, path: str) -> str:
        """A class or function, imported from where users import it."""
        module, qualname = getattr(target, "__module__", None), getattr(target, "__qualname__", "")
        if module == "builtins":
            return qualname
        root, dot, rest = qualname.partition(".")
        if not module or module == "__main__" or _lookup(import_module(module), qualname) is not target:
            raise ConfigError(f"{path} names {target!r}, which cannot be imported by name.")
        home = _home(module, root)
        if home == "nemo2.llm":
            return f"{self.imports.name('nemo2', 'llm')}.{qualname}"
        if home == "nemo2":
            return f"{self.imports.module('nemo2', 'nl')}.{qualname}"
        return f"{self.imports.name(home, root)}{dot}{rest}"


def shared_values(*roots: Any) -> set[int]:
    """The ids of configs, lists and dicts that are used in more than one place of a tree."""
    seen: set[int] = set()
    shared: set[int] = set()

    def visit(value: Any) -> None:
        if isinstance(value, fdl.Buildable | list | dict):
            if id(value) in seen:
                shared.add(id(value))
                return
            seen.add(id(value))
        for _, child in children(value):
            visit(child)

    for root in roots:
        visit(root)
    return shared


def layout(expression: Expression, indent: int, used: int = 0, after: int = 0) -> str:
    """The text of an expression: on one line if it fits, otherwise on several lines.

    ``indent`` is the indent of its first line, ``used`` the columns already taken on that line, and ``after`` the
    number of columns needed behind it.
    """
    line = flat(expression)
    if isinstance(expression, str) or not expression.items or indent + used + len(line) + after <= WIDTH:
        return line
    inner = indent + 4
    lines = [f"{' ' * inner}{before}{layout(item, inner, len(before), 1)}," for before, item in expression.items]
    return "\n".join([expression.opening, *lines, " " * indent + expression.closing.removeprefix(",")])


def flat(expression: Expression) -> str:
    """An expression on one line."""
    if isinstance(expression, str):
        return expression
    items = ", ".join(f"{before}{flat(item)}" for before, item in expression.items)
    return f"{expression.opening}{items}{expression.closing}"


def is_plain_name(name: str) -> bool:
    """Whether code can write a field's name without quotes. A config of ``dict`` has any text as a field, and a file from
    elsewhere may choose it."""
    return name.isidentifier() and not keyword.iskeyword(name)


def quoted(text: str) -> str:
    """The ``repr`` of a text, in double quotes unless single quotes need fewer escapes."""
    written = repr(text)
    if written.startswith('"') or '"' in text:
        return written
    inner = written[1:-1].replace("\\'", "'")
    return f'"{inner}"'


_BRACKETS: dict[type, tuple[str, str]] = {
    list: ("[", "]"),
    tuple: ("(", ")"),
    dict: ("{", "}"),
    set: ("{", "}"),
    frozenset: ("frozenset(", ")"),
}


def _home(module: str, name: str) -> str:
    """The module to import a name from: a public place, or the shortest parent package that has the name."""
    own = getattr(import_module(module), name)
    if module.partition(".")[0] == "nemo2":
        for door in _FRONT_DOORS:
            exported = import_module(door)
            if name in exported.__all__ and getattr(exported, name) is own:
                return door
        return module
    parts = module.split(".")
    packages = [".".join(parts[:end]) for end in range(1, len(parts)) if not any(p[0] == "_" for p in parts[:end])]
    return next((package for package in packages if getattr(sys.modules.get(package), name, None) is own), module)


def _lookup(module: Any, qualname: str) -> Any:
    value: Any = module
    for part in qualname.split("."):
        value = getattr(value, part, None)
    return value


def _from_import(module: str, names: list[tuple[str, str]]) -> list[str]:
    written = [name if name == alias else f"{name} as {alias}" for name, alias in names]
    line = f"from {module} import {', '.join(written)}"
    return [line] if len(line) <= WIDTH else [f"from {module} import (", *(f"    {name}," for name in written), ")"]


def _by_kind(name: tuple[str, str]) -> tuple[int, str]:
    """Constants, classes, functions, each in alphabetical order, as in isort."""
    text = name[0]
    kind = 0 if text.isupper() and len(text) > 1 else 1 if text[:1].isupper() else 2
    return kind, text


def _is_stdlib(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names
