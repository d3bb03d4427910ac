# SPDX-License-Identifier: Apache-2.0
"""Serializes values in a recipe's JSON that fiddle doesn't support.

Paths, time spans and torch devices are written as text. torch dtypes and the built-in functions that serve as
activations (`torch.tanh`, `torch.nn.functional.gelu`) are written as references to their public names, which are
registered on first use. Reading needs no preparation: a recipe's root is a nemo2 config, so the reader has imported
this module before it reads a value.
"""

import pathlib
import sys
import types
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import fiddle as fdl
from fiddle._src.experimental import serialization

_CONSTANT_HOMES = ("torch.nn.functional", "torch", "torch.special")

_carried: dict[int, Any] = {}
"""The values of registered types that nodes of ours have carried, by id. In other trees they remain unserializable, because
nothing would make the reader import this module."""


def _register_type(cls: type, to_text: Callable[[Any], tuple], from_text: Callable[..., Any], parts: int = 1) -> None:
    def flatten(value: Any) -> tuple[tuple, None]:
        if id(value) not in _carried:
            raise serialization.UnserializableValueError(
                f"Unserializable value {value!r} of {type(value)}: only a nemo2.config.Partial or Config can carry "
                "it to another process."
            )
        return to_text(value), None

    serialization.register_node_traverser(
        cls,
        flatten_fn=flatten,
        unflatten_fn=lambda values, _: from_text(*values),
        path_elements_fn=lambda _: (serialization.IdentityElement(),) * parts,
    )


_TYPES: list[type] = [pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath, pathlib.PureWindowsPath, timedelta]
for _type in _TYPES[:4]:
    _register_type(_type, lambda path: (str(path),), pathlib.Path if issubclass(_type, pathlib.Path) else _type)
_register_type(timedelta, lambda span: (span.days, span.seconds, span.microseconds), timedelta, parts=3)
if _torch := sys.modules.get("torch"):
    _TYPES.append(_torch.device)
    _register_type(_torch.device, lambda device: (str(device),), _torch.device)


def register_values(value: Any) -> None:
    """Let fiddle write the paths, time spans, devices, torch dtypes and built-in functions in `value`.

    Enters lists, tuples, dicts and the arguments of plain fiddle configs.
    """
    if isinstance(value, fdl.Buildable):
        for argument in value.__arguments__.values():
            register_values(argument)
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            register_values(item)
    elif type(value) in _TYPES:
        _carried[id(value)] = value
    elif id(value) not in serialization._serialization_constants_by_id and (name := constant_name(value)):
        module, _, symbol = name.rpartition(".")
        serialization.register_constant(module, symbol, compare_by_identity=True)


def constant_name(value: Any) -> str | None:
    """`"torch.bfloat16"`, `"torch.nn.functional.gelu"` ...: the public name of a dtype or built-in, None otherwise."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, types.BuiltinFunctionType):
        for home in _CONSTANT_HOMES:
            name = value.__name__.removeprefix("special_") if home == "torch.special" else value.__name__
            if getattr(sys.modules.get(home), name, None) is value:
                return f"{home}.{name}"
    return None
