# SPDX-License-Identifier: Apache-2.0
"""Shows a recipe as text: flat, as an indented tree, as plain data for YAML, and as the difference between two
recipes."""

import dataclasses
import enum
import inspect
import pathlib
from datetime import timedelta
from typing import Any

import fiddle as fdl
import yaml

from nemo2.base.names import visible
from nemo2.config import wire
from nemo2.config.provenance import is_same
from nemo2.config.tree import Config, Partial, bring_up_to_date
from nemo2.config.walk import children, place_of

TARGET = "_target_"
"""The key of a config's class or function, as in YAML."""


class _NotSet:
    def __repr__(self) -> str:
        return "(not set)"


NOT_SET = _NotSet()
"""Stands for a required parameter without a value, and for a path that only the other recipe has."""
_LINE = 100
"""Characters of a list or dict without configs that is shown on one line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """A path at which two recipes differ. `str` returns the line to show."""

    path: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.path}: {format_value(self.old)} -> {format_value(self.new)}"


def flatten(recipe: Any, defaults: bool = False) -> dict[str, Any]:
    """Return every value of the recipe by its dotted path. `trainer.callbacks[0]._target_` holds a config's class.

    A config that is used in two places is listed at both. The values are the recipe's own, not copies.

    Args:
        recipe: The recipe.
        defaults: Include unset parameters. Required parameters without a value are `NOT_SET`.
    """
    flat: dict[str, Any] = {}

    def visit(path: str, value: Any) -> None:
        if isinstance(value, fdl.Buildable):
            flat[f"{path}.{TARGET}".removeprefix(".")] = qualified_name(value.__fn_or_cls__)
        steps = effective_children(value, defaults=defaults)
        if not steps and not isinstance(value, fdl.Buildable):
            flat[path] = value
        for step, child in steps:
            visit(f"{path}{step}".removeprefix("."), child)

    visit("", recipe)
    return flat


@dataclasses.dataclass(frozen=True, kw_only=True)
class Branch:
    """A value at its place in a recipe, with the values inside it."""

    step: str
    """``.name`` of a field, ``[index]`` of an item. "": the recipe itself."""
    value: Any
    owner: Any = None
    """The config or container that has the value. None: the recipe has no owner."""
    default: bool = False
    """Whether it is an unset field."""
    first: str = ""
    """The path where the same config stands already. "": it stands here for the first time."""
    inside: tuple["Branch", ...] = ()
    """The fields of a config, or the items of a container that has configs or doesn't fit on a line."""

    @property
    def label(self) -> str:
        """The field's name, or the index or key of an item."""
        return self.step[1:] if self.step.startswith(".") else self.step[1:-1]

    @property
    def place(self) -> str:
        """The ``file:line`` that set a field last. "": nothing set it, or it is an item."""
        is_field = isinstance(self.owner, fdl.Buildable) and self.step.startswith(".")
        return place_of(self.owner, self.label) if is_field and not self.default else ""


def tree(recipe: Any, *, defaults: bool = False) -> Branch:
    """The recipe as branches, for the texts and pictures that show it. ``defaults`` includes unset fields."""
    paths: dict[int, str] = {}

    def branch(step: str, value: Any, path: str, **place: Any) -> Branch:
        if isinstance(value, fdl.Buildable):
            if id(value) in paths:
                return Branch(step=step, value=value, first=paths[id(value)], **place)
            paths[id(value)] = path or "the recipe"
        elif not holds_configs(value) and len(format_value(value)) <= _LINE:
            return Branch(step=step, value=value, **place)
        set_here = {step for step, _ in children(value)}
        inside = tuple(
            branch(below, child, f"{path}{below}".removeprefix("."), owner=value, default=below not in set_here)
            for below, child in effective_children(value, defaults=defaults)
        )
        return Branch(step=step, value=value, inside=inside, **place)

    return branch("", recipe, "")


def render(recipe: Any, defaults: bool = False, who: bool = False) -> str:
    """Return the recipe as an indented tree, one line per value.

    A config that is used in two places is written once, and the second place refers to it.

    Args:
        recipe: The recipe.
        defaults: Show unset parameters too, with their defaults in brackets.
        who: Show after each set value the file and line that set it last.
    """
    lines: list[str] = []

    def write(one: Branch, label: str, depth: int) -> None:
        value = one.value
        if one.first:
            text = f"same as {one.first}"
        elif isinstance(value, fdl.Buildable):
            text = class_name(value.__fn_or_cls__) + ("" if isinstance(value, fdl.Config) else " (partial)")
        else:
            text = "" if one.inside else format_value(value)
        note = "  [default]" if one.default else f"  # {one.place}" if who and one.place else ""
        lines.append(f"{'  ' * depth}{label}{text}".rstrip() + note)
        for below in one.inside:
            write(below, "- " if isinstance(value, list | tuple) else f"{below.label}: ", depth + 1)

    write(tree(recipe, defaults=defaults), "", 0)
    return visible("\n".join(lines))  # a file from elsewhere chooses the names in a dict


def diff(old: Any, new: Any) -> list[Change]:
    """Return the paths at which the effective values of two recipes differ. A default equals the same value set
    explicitly.

    Lists are compared by index. If the class of a config differs, only its explicit values are compared.

    Args:
        old: The recipe before.
        new: The recipe after.
    """
    before, after = flatten(old, defaults=True), flatten(new, defaults=True)
    explicit = dict.fromkeys([*flatten(old), *flatten(new)])
    changes = []
    for path in explicit:
        left, right = before.get(path, NOT_SET), after.get(path, NOT_SET)
        if not is_same(left, right):
            changes.append(Change(path=path, old=left, new=right))
    return changes


def plain(value: Any, defaults: bool = False) -> Any:
    """`value` as data for any YAML or JSON writer: configs as mappings with `_target_`, other values as text.

    For reading only: sharing and types are lost.
    """
    if isinstance(value, fdl.Buildable):
        shown: dict[str, Any] = {TARGET: qualified_name(value.__fn_or_cls__)}
        if not isinstance(value, fdl.Config):
            shown["_partial_"] = True
        steps = effective_children(value, defaults=defaults)
        return shown | {step.strip(".[]"): plain(child, defaults) for step, child in steps}
    if isinstance(value, dict):
        return {key if isinstance(key, str | int) else str(key): plain(item, defaults) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, defaults) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(item, defaults) for item in value), key=str)
    if value is None or type(value) in (bool, int, float, str):
        return value
    return format_value(value)


def shown_value(value: Any) -> str:
    """`format_value` for display: floats without rounding errors in the last digits, ``3e-05`` for
    ``2.9999999999999997e-05``."""
    return repr(float(f"{value:.12g}")) if type(value) is float else format_value(value)


def format_value(value: Any) -> str:
    """A value as a user would write it: `torch.bfloat16`, `torch.nn.functional.gelu`, `'text'`, `1e-05`."""
    if name := wire.constant_name(value):
        return name
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, pathlib.PurePath | timedelta):
        return str(value)
    if isinstance(value, list | tuple):
        opening, closing = "[]" if isinstance(value, list) else "()"
        return f"{opening}{', '.join(format_value(item) for item in value)}{closing}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {format_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, fdl.Buildable):
        return class_name(value.__fn_or_cls__)
    if isinstance(value, type) or inspect.isroutine(value):
        return qualified_name(value)
    return repr(value)


def qualified_name(target: Any) -> str:
    """The `module.qualname` of a class or function, or its text if it has none."""
    name = wire.constant_name(target) or getattr(target, "__qualname__", None)
    module = getattr(target, "__module__", None)
    if name is None:
        return str(target)
    return name if module in (None, "builtins") or wire.constant_name(target) else f"{module}.{name}"


def effective_children(value: Any, *, defaults: bool) -> list[tuple[str, Any]]:
    """`children`. With `defaults` also the unset children of a config, as `NOT_SET` if they have no default."""
    if not defaults or not isinstance(value, fdl.Buildable):
        return children(value)
    if isinstance(value, Config | Partial):
        bring_up_to_date(value)
    arguments = fdl.ordered_arguments(value, include_unset=True, include_defaults=True)
    steps = []
    for key, child in arguments.items():
        if child is fdl.NO_VALUE:
            child = NOT_SET
        elif isinstance(key, str) and key not in value.__arguments__:
            child = value_in_effect(value, key, otherwise=child)
        steps.append((f".{key}" if isinstance(key, str) else f"[{key}]", child))
    return steps


def value_in_effect(node: Any, name: str, *, otherwise: Any = NOT_SET) -> Any:
    """A field's value or default, as the tree returns it. ``otherwise``: the value of a field that has neither. Plain
    fiddle configs don't reveal the result of a default factory."""
    try:
        return getattr(node, name)
    except (AttributeError, ValueError):
        return otherwise


def holds_configs(value: Any) -> bool:
    """Whether the value is a config, or a container with a config in it."""
    return isinstance(value, fdl.Buildable) or any(holds_configs(child) for _, child in children(value))


def class_name(target: Any) -> str:
    """The name of a config's class or function, without its module."""
    return getattr(target, "__qualname__", str(target))


for _kind in (Config, Partial):  # nemo-run saves a readable copy of each task
    yaml.SafeDumper.add_representer(_kind, lambda dumper, node: dumper.represent_data(plain(node)))
