# SPDX-License-Identifier: Apache-2.0
"""Writes a recipe as JSON, after a check that lists every value without a textual form, who set it, and the fix.

nemo-run's own transport between a launcher and its workers doesn't use this module, because the user controls both ends.
"""

import math
import types
from typing import Any

import fiddle as fdl
from fiddle._src.experimental import serialization

from nemo2.base.errors import ConfigError
from nemo2.base.names import shortened
from nemo2.config.tree import Config, Partial, refuse_changed_objects
from nemo2.config.walk import children, set_at

_PLAIN = frozenset((bool, int, str, type(None)))
"""Types whose values are always written unchanged."""


def to_json(recipe: Any, *, indent: int | None = None) -> str:
    """Write the recipe as JSON: everything except its history, with shared configs still shared.

    Args:
        recipe: The recipe.
        indent: Columns per level. None: one line.

    Raises:
        ConfigError: values have no textual form. The message lists all of them.
    """
    check_serialisable(recipe)
    return serialization.dump_json(recipe, indent=indent)


def check_serialisable(recipe: Any) -> None:
    """Reject a recipe that can't be sent to another process, with all its problems at once.

    Args:
        recipe: The recipe.

    Raises:
        ConfigError: a line for each value: its path, the value, who set it and the fix.
    """
    sentences = problems(recipe)
    if sentences:
        many = f"{len(sentences)} values" if len(sentences) > 1 else "A value"
        raise ConfigError(f"{many} of this recipe cannot be sent to another process:\n  " + "\n  ".join(sentences))


def problems(recipe: Any) -> list[str]:
    """One line for each value that can't be serialized. Empty: all values can."""
    sentences: list[str] = []
    seen: set[int] = set()

    def visit(path: str, value: Any, field: tuple[Any, str] | None) -> None:
        if type(value) in _PLAIN:
            return
        steps = children(value)
        if isinstance(value, fdl.Buildable) or steps:
            if id(value) in seen:
                return
            seen.add(id(value))
        if isinstance(value, fdl.Buildable):
            if trouble := _trouble_with_node(value):
                sentences.append(f"{path or 'the recipe'}: {trouble}{set_at(*field) if field else ''}")
        elif not steps and (trouble := _trouble_with(value)):
            sentences.append(
                f"{path or 'the recipe'} = {shortened(repr(value))}: {trouble}{set_at(*field) if field else ''}"
            )
        for step, child in steps:
            is_field = isinstance(value, fdl.Buildable) and step.startswith(".")
            visit(f"{path}{step}".removeprefix("."), child, (value, step[1:]) if is_field else field)

    visit("", recipe, None)
    return sentences


def _trouble_with_node(node: Any) -> str | None:
    if isinstance(node, Config | Partial):
        try:
            refuse_changed_objects(node)
        except ConfigError as error:
            return str(error)
    if _can_be_written(node.__fn_or_cls__):
        return None
    return f"{node.__fn_or_cls__!r} cannot be imported by name. {_FIXES['callable']}"


def _trouble_with(value: Any) -> str | None:
    if isinstance(value, float) and math.isnan(value):
        return (
            "nan is not equal to itself, so nemo-run treats the task as changed and rejects it. Remove the value, or "
            "set None."
        )
    if _can_be_written(Config(list, [value], bind_args=False)):
        return None
    if callable(value) and isinstance(value, types.FunctionType | types.MethodType | types.BuiltinFunctionType):
        return f"it cannot be imported by name on another machine. {_FIXES['callable']}"
    if callable(value) and not isinstance(value, type) and hasattr(value, "func"):
        return "a partial of something without a readable signature. " + _FIXES["callable"]
    return f"a live object: nemo2 cannot tell how {type(value).__qualname__} was created. " + _FIXES["object"].format(
        name=type(value).__qualname__
    )


_FIXES = {
    "callable": "Write a function with `def` at the top level of a module and pass that.",
    "object": "Pass nemo2.config.Config({name}, ...) instead, or decorate the class with @nemo2.config.configurable.",
}


def _can_be_written(value: Any) -> bool:
    try:
        serialization.Serialization(value)
    except Exception:  # fiddle, AttributeError, ImportError ...: the value has no text
        return False
    return True
