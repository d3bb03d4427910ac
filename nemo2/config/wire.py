# SPDX-License-Identifier: Apache-2.0
"""How values travel in a recipe's JSON: what fiddle's serialisation lacks.

Paths, time spans and torch devices are written as a `Portable` of their text. torch dtypes and the built-in functions
that serve as activations (`torch.tanh`, `torch.nn.functional.gelu`) are written as references to their public names,
registered when one is met, so that nothing imports torch that hasn't already. Reading needs no preparation: a reader
loads this module because the text names it.
"""

import importlib
import pathlib
import sys
import types
from datetime import timedelta
from typing import Any

import fiddle as fdl
from fiddle._src.experimental import serialization

_PUBLIC_HOMES = ("torch.nn.functional", "torch", "torch.special")
_PATHS = {
    "path": pathlib.Path,
    "pure_posix_path": pathlib.PurePosixPath,
    "pure_windows_path": pathlib.PureWindowsPath,
}


class Portable:
    """A value as a kind and its text; becomes the value itself when read."""

    def __init__(self, kind: str, text: str) -> None:
        self.kind = kind
        self.text = text


def to_wire(value: Any) -> Any:
    """`value`, or a copy of it in which everything fiddle can't write is a `Portable`; registers torch's constants.

    Enters lists, tuples, dicts and the arguments of plain fiddle configs (these only to register constants).
    """
    if isinstance(value, pathlib.PurePath):
        kinds = [kind for kind, cls in _PATHS.items() if isinstance(value, cls)]
        return Portable(kinds[0], str(value))
    if isinstance(value, timedelta):
        return Portable("timedelta", f"{value.days},{value.seconds},{value.microseconds}")
    if _is_torch(value, "device"):
        return Portable("torch_device", str(value))
    if isinstance(value, fdl.Buildable):
        for argument in value.__arguments__.values():
            if type(argument) in (list, tuple, dict) or not isinstance(argument, fdl.Buildable):
                to_wire(argument)
        return value
    if type(value) in (list, tuple):
        items = [to_wire(item) for item in value]
        return value if all(new is old for new, old in zip(items, value, strict=True)) else type(value)(items)
    if type(value) is dict:
        entries = {key: to_wire(item) for key, item in value.items()}
        return value if all(entries[key] is value[key] for key in value) else entries
    register_constant(value)
    return value


def register_constant(value: Any) -> None:
    """Let fiddle write a torch dtype or a built-in function of torch by its public name; ignores anything else."""
    if id(value) in serialization._serialization_constants_by_id:
        return
    if name := constant_name(value):
        module, _, symbol = name.rpartition(".")
        serialization.register_constant(module, symbol, compare_by_identity=True)


def constant_name(value: Any) -> str | None:
    """`"torch.bfloat16"`, `"torch.nn.functional.gelu"` ...: the public name of a dtype or built-in, None otherwise."""
    if _is_torch(value, "dtype"):
        return str(value)
    if isinstance(value, types.BuiltinFunctionType) and "torch" in sys.modules:
        for home in _PUBLIC_HOMES:
            module = sys.modules.get(home)
            if module is not None and getattr(module, value.__name__, None) is value:
                return f"{home}.{value.__name__}"
    return None


def _is_torch(value: Any, kind: str) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, getattr(torch, kind))


def _from_text(kind: str, text: str) -> Any:
    if kind in _PATHS:
        return _PATHS[kind](text)
    if kind == "timedelta":
        days, seconds, microseconds = (int(part) for part in text.split(","))
        return timedelta(days=days, seconds=seconds, microseconds=microseconds)
    if kind == "torch_device":
        return importlib.import_module("torch").device(text)
    raise serialization.DeserializationError(f"A recipe holds a value of the unknown kind {kind!r}.")


serialization.register_node_traverser(
    Portable,
    flatten_fn=lambda value: ((value.kind, value.text), None),
    unflatten_fn=lambda values, _: _from_text(*values),
    path_elements_fn=lambda _: (serialization.IdentityElement(),) * 2,
)


def wire_flatten(flatten: Any) -> Any:
    """A serialising `flatten_fn` for config nodes: `flatten`, with the values of the arguments made portable."""

    def flatten_for_wire(node: Any) -> tuple[tuple[Any, ...], Any]:
        values, metadata = flatten(node)
        return tuple(to_wire(value) for value in values), metadata

    return flatten_for_wire
