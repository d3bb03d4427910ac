# SPDX-License-Identifier: Apache-2.0
"""Reads NeMo 2.0's ``context/io.json``, ``task.json`` and ``model.yaml`` as plain data: the calls by name, with their
arguments.

The JSON is fiddle's: objects that refer to each other, each with the name of its type. This module imports no name from
the file, and doesn't open what NeMo pickled beside it. The reader decides how to map the names of classes and
functions.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from nemo2.base.errors import CheckpointError
from nemo2.checkpoint.foreign_files import MOST_DEPTH, MOST_VALUES, read_json, read_yaml
from nemo2.config.reading import has_at_most_values

_PLAIN = (bool, int, float, str, type(None))


class Named(NamedTuple):
    """A class, function or constant that the file names."""

    module: str
    name: str
    """The dotted name inside the module."""

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False)
class Call:
    """A call in the file, and its arguments by name. Shared if the file shares it."""

    target: Named
    arguments: dict[str, Any] = field(default_factory=dict)
    pickled: str = ""
    """The file that holds the object in place of arguments; nemo2 doesn't open it."""

    def __str__(self) -> str:
        return f"{self.target.name}(...)"


def read_io_json(path: Path) -> Any:
    """The value of fiddle's JSON at ``path``, of `Call`, `Named`, lists, tuples, dicts and plain values.

    Raises:
        CheckpointError: the file is missing, isn't fiddle's JSON, is too large or too deep, or its objects contain each
            other.
    """
    tree = read_json(path)
    if not isinstance(tree, dict) or not isinstance(tree.get("objects"), dict) or "root" not in tree:
        raise CheckpointError(f"{path} is not a fiddle configuration: it has no root and objects.")
    if not has_at_most_values(tree["root"], tree["objects"], most=MOST_VALUES):
        raise CheckpointError(
            f"{path} contains more than {MOST_VALUES} values, counting shared objects as often as they occur."
        )
    return _Objects(tree["objects"], path).value(tree["root"], 0)


def read_model_yaml(path: Path) -> Any:
    """The value of ``model.yaml``, in the types of `read_io_json`. Errors: see `read_io_json`."""
    return _of_yaml(read_yaml(path))


class _Objects:
    """fiddle's objects by key. Each object is read once."""

    def __init__(self, objects: dict[str, Any], path: Path) -> None:
        self._objects, self._path = objects, path
        self._read: dict[str, Any] = {}

    def value(self, item: Any, depth: int) -> Any:
        if depth > MOST_DEPTH:
            raise CheckpointError(f"{self._path} is more than {MOST_DEPTH} levels deep.")
        if isinstance(item, list):
            return [self.value(one, depth + 1) for one in item]
        if not isinstance(item, dict):
            return item
        kind = item.get("type")
        if kind == "leaf" and isinstance(item.get("value"), _PLAIN):
            return item.get("value")
        if kind == "ref":
            key = str(item.get("key"))
            if key not in self._objects:
                raise CheckpointError(f"{self._path} is not a fiddle configuration: it has no object {key:.80}.")
            if key not in self._read:
                self._read[key] = self.value(self._objects[key], depth + 1)
            return self._read[key]
        if kind == "pyref":
            return self._named(item)
        if isinstance(kind, dict):
            return self._object(self._named(kind), item, depth)
        raise CheckpointError(f"{self._path} is not a fiddle configuration: it has a value of type {kind!r:.80}.")

    def _named(self, item: dict[str, Any]) -> Named:
        module, name = item.get("module"), item.get("name")
        if not isinstance(module, str) or not isinstance(name, str):
            raise CheckpointError(
                f"{self._path} is not a fiddle configuration: it has a reference without module and name."
            )
        return Named(module, name)

    def _object(self, kind: Named, item: dict[str, Any], depth: int) -> Any:
        items = item.get("items")
        if not isinstance(items, list) or not all(isinstance(one, list) and len(one) == 2 for one in items):
            raise CheckpointError(
                f"{self._path} is not a fiddle configuration: it has an object of {kind} without items."
            )
        values = [self.value(one, depth + 1) for _, one in items]
        metadata = self.value(item.get("metadata"), depth + 1)
        if kind.module == "builtins" and kind.name in ("list", "tuple", "set", "frozenset"):
            return values if kind.name == "list" else tuple(values)
        if kind == ("builtins", "dict"):
            return dict(zip(metadata, values, strict=True)) if _are_keys(metadata, values) else {}
        if kind == ("fiddle._src.config", "BuildableTraverserMetadata"):
            return values
        if isinstance(metadata, list) and metadata and isinstance(metadata[0], Named):
            # A config, or an object that NeMo writes like one: its target, the names of its arguments, their tags.
            names = metadata[1] if len(metadata) > 1 else ()
            if _are_keys(names, values):
                return Call(metadata[0], dict(zip(names, values, strict=True)))
        if len(values) == 1 and isinstance(values[0], str):
            # NeMo pickles objects that it can't describe, and writes paths and similar values as text.
            return (
                Call(kind, {"": values[0]})
                if kind.module.partition(".")[0] == "pathlib"
                else Call(kind, pickled=values[0])
            )
        return Call(kind, {str(number): value for number, value in enumerate(values)})


def _are_keys(names: Any, values: list[Any]) -> bool:
    return (
        isinstance(names, list | tuple) and len(names) == len(values) and all(isinstance(one, _PLAIN) for one in names)
    )


def _of_yaml(value: Any) -> Any:
    if isinstance(value, list):
        return [_of_yaml(one) for one in value]
    if not isinstance(value, dict):
        return value
    target = value.get("_target_")
    arguments = {
        str(name): _of_yaml(one) for name, one in value.items() if name not in ("_target_", "_call_", "_partial_")
    }
    if not isinstance(target, str):
        return arguments
    named = Named(*target.rpartition(".")[::2])
    return named if value.get("_call_") is False else Call(named, arguments)
