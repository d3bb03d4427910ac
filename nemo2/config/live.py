# SPDX-License-Identifier: Apache-2.0
"""Live objects as configs: the arguments that made an object, and whether they still describe it.

Three kinds of objects can become configs again: instances of `@configurable` classes (from their recorded arguments),
dataclass instances (from their fields) and `functools.partial` objects of importable callables.
"""

import dataclasses
import functools
import inspect
from collections.abc import Mapping
from typing import Any

import fiddle as fdl

from nemo2.base.errors import ConfigError
from nemo2.config.capture import captured_arguments, changed_since_made
from nemo2.config.provenance import is_same


def rebuilding_arguments(obj: object) -> dict[str, Any] | None:
    """Keyword arguments that make an object like `obj`. None: the arguments are unknown.

    The arguments include edits of a dataclass's fields after construction. The edits are first added to the captured
    arguments, so that derived fields follow, and then set for each field that still differs.
    """
    if isinstance(obj, type | fdl.Buildable):
        return None
    arguments = captured_arguments(obj)
    if not dataclasses.is_dataclass(obj):
        return arguments
    fields = [field.name for field in dataclasses.fields(obj) if field.init]
    if arguments is None:
        # The init fields that differ from their defaults, unless the constructor needs more than fields.
        signature = inspect.signature(type(obj))
        if any(p.default is p.empty and p.name not in fields for p in signature.parameters.values()):
            return None
        arguments = {}
        for field in dataclasses.fields(obj):
            if not field.init:
                continue
            value = getattr(obj, field.name)
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            if not is_same(value, default):
                arguments[field.name] = value
        return arguments
    for _ in range(2):
        edited = [name for name in changed_since_made(obj, arguments) if name in fields]
        if not edited:
            break
        arguments |= {name: getattr(obj, name) for name in edited}
    return arguments


def refuse_if_changed(obj: object, arguments: Mapping[str, Any], *, where: str) -> None:
    """Raise if `arguments` no longer describe the live object that a config node stands for.

    Raises:
        ConfigError: attributes of the object were changed directly. The message names them.
    """
    if changed := changed_since_made(obj, arguments):
        name = type(obj).__qualname__
        listed = ", ".join(f"{attribute}={getattr(obj, attribute, None)!r}" for attribute in changed)
        raise ConfigError(
            f"{where} is a live {name} whose {listed} changed after it was created. Its arguments no longer describe "
            f"it, so a copy of the recipe would lose the change. Pass the value to {name}(...), or use "
            f"nemo2.config.Config({name}, ...) and set the value there."
        )


def partial_call(obj: functools.partial) -> tuple[tuple, dict[str, Any]] | None:
    """Positional and keyword arguments of a `functools.partial`. None: its callable has no signature."""
    try:
        inspect.signature(obj.func).bind_partial(*obj.args, **obj.keywords)
    except (TypeError, ValueError):
        return None
    return obj.args, dict(obj.keywords)
