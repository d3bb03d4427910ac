# SPDX-License-Identifier: Apache-2.0
"""The difference between two recipes as a minimal list of edits: as data, as lines to read, and as Python to run.

The edits compare explicit values: a value that only one tree sets is an edit even if it equals the default. Applied to
the first tree, the edits therefore give a tree equal to the second. `nemo2.config.diff` and the lines to read compare
effective values.
"""

import copy
import difflib
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import fiddle as fdl

from nemo2.base.errors import ConfigError
from nemo2.config.codegen import (
    Group,
    Imports,
    Writer,
    is_plain_name,
    layout,
    quoted,
    run_function,
    same_tree,
    shared_values,
)
from nemo2.config.provenance import is_same
from nemo2.config.serialize import check_serialisable
from nemo2.config.show import NOT_SET, TARGET, class_name, flatten, format_value, qualified_name, value_in_effect
from nemo2.config.tree import Partial
from nemo2.config.walk import children, iterate_nodes


class Unset(NamedTuple):
    """Stands for an unset field, or a missing key of a dict."""

    default: Any
    """The value in effect without a setting. `NOT_SET`: there is no default."""


class Field(str):
    """The name of a config's field, as opposed to the key of a dict."""


class Edit(NamedTuple):
    """One step. The steps apply in order: an index refers to the list after the previous steps."""

    kind: Literal["set", "unset", "append", "insert", "remove"]
    owner: str
    """The path of the edited part. Empty: the recipe itself."""
    key: Any
    """A `Field`, a dict's key or a list's index."""
    old: Any
    """The value before. `Unset` for a field that is set for the first time, and for a list's new item."""
    new: Any
    """The value afterwards. `Unset` for a field that is unset, and for an item that is removed."""

    @property
    def path(self) -> str:
        """``trainer.callbacks[1]``."""
        if isinstance(self.key, Field):
            return f"{self.owner}.{self.key}".removeprefix(".")
        return f"{self.owner}[{self.key!r}]"

    @property
    def changes_nothing(self) -> bool:
        """Whether the effective value stays the same, because the edit sets or unsets a default."""
        return is_same(_effective(self.old), _effective(self.new))


def edits(old: Any, new: Any) -> list[Edit]:
    """The steps from one tree to another of the same function. Neither is changed.

    Items of lists are matched by their kind (the class of a config), so that a callback added at the front is one
    insertion.

    Raises:
        ConfigError: the trees call different functions.
    """
    if not _same_target(old, new):
        raise ConfigError(
            f"A call of {qualified_name(old.__fn_or_cls__)} cannot be edited into a call of "
            f"{qualified_name(new.__fn_or_cls__)}."
        )
    steps: list[Edit] = []
    _compare_fields(old, new, "", steps)
    return steps


def edits_source(old: Any, new: Any, *, name: str = "edit", doc: str = "") -> str:
    """A module with a function that edits the first tree into one equal to the second, in place, and returns it.

    Where the trees call different functions, share a part between places, or have a field whose name isn't Python's, the
    function returns a new tree.

    Raises:
        ConfigError: a value has no textual form.
    """
    check_serialisable(new)
    imports = Imports(taken=[name, "recipe"])
    writer = Writer(imports, new)
    if _same_target(old, new) and not any(shared_values(tree) or _has_odd_names(tree) for tree in (old, new)):
        lines = [_statement(step, writer) for step in edits(old, new)]
    else:
        written = writer.expression(new)
        lines = [f"{variable} = {layout(value, 4, len(variable) + 3)}" for variable, value in writer.assignments()]
        lines.append(f"recipe = {layout(written, 4, len('recipe = '))}")
    kind = imports.name("nemo2", "Partial" if isinstance(new, Partial) else "Config")
    body = [f'"""{doc}"""'] if doc else []
    head = f"def {name}(recipe: {kind}) -> {kind}:"
    body += [*lines, "return recipe"]
    source = "\n".join([*imports.lines(), "", "", head, *(f"    {line}" for line in body)]) + "\n"
    if not same_tree(run_function(source, name, copy.deepcopy(old)), new):
        raise ConfigError(
            "These two recipes cannot be turned into each other by code. Check for an object in them whose class "
            "defines no equality."
        )
    return source


def describe(steps: list[Edit]) -> Iterator[tuple[str, str]]:
    """``(mark, line)`` for each step: ``~`` for a changed value, ``+`` for a new part, ``-`` for a removed part.

    If the class of a part changes, the differing values under it follow, including defaults.
    """
    for step in steps:
        old, new = _effective(step.old), _effective(step.new)
        if isinstance(old, fdl.Buildable) and isinstance(new, fdl.Buildable):
            yield "~", f"{step.path}: {class_name(old.__fn_or_cls__)} -> {class_name(new.__fn_or_cls__)}"
            yield from _differing_values(old, new, step.path)
        elif step.kind in ("append", "insert") or (
            isinstance(new, fdl.Buildable) and not isinstance(old, fdl.Buildable)
        ):
            yield "+", f"{step.path}: {one_line(new)}"
        elif step.kind == "remove" or (isinstance(old, fdl.Buildable) and not isinstance(new, fdl.Buildable)):
            yield "-", f"{step.path}: {one_line(old)}"
        else:
            yield "~", f"{step.path}: {one_line(old)} -> {one_line(new)}"


def one_line(value: Any) -> str:
    """A value in the form of `format_value`, and configs with their set values:
    ``TimingCallback(log_tokens_per_sec=True)``."""
    if isinstance(value, fdl.Buildable):
        arguments = (f"{step.removeprefix('.')}={one_line(child)}" for step, child in children(value))
        return f"{class_name(value.__fn_or_cls__)}({', '.join(arguments)})"
    if isinstance(value, list):
        return f"[{', '.join(one_line(item) for item in value)}]"
    return format_value(value)


def _compare(old: Any, new: Any, owner: str, key: Any, steps: list[Edit]) -> None:
    here = Edit("set", owner, key, old, new)
    if _same_target(old, new) and not _has_positional(old) and not _has_positional(new):
        _compare_fields(old, new, here.path, steps)
    elif type(old) is list and type(new) is list and (_holds_configs(old) or _holds_configs(new)):
        _compare_lists(old, new, here.path, steps)
    elif type(old) is dict and type(new) is dict and old and new:
        _compare_keys(old, new, here.path, steps, lambda key: key, lambda _, key: NOT_SET)
    elif not is_same(old, new):
        steps.append(here)


def _compare_fields(old: Any, new: Any, path: str, steps: list[Edit]) -> None:
    before = {step[1:]: child for step, child in children(old)}
    after = {step[1:]: child for step, child in children(new)}
    _compare_keys(before, after, path, steps, Field, lambda mine, name: value_in_effect(old if mine else new, name))


def _compare_keys(
    old: dict, new: dict, owner: str, steps: list[Edit], key: Callable[[Any], Any], default: Callable[[bool, Any], Any]
) -> None:
    """``default`` returns the value of a missing key, in the first tree if its argument is True, else in the second."""
    for name in dict.fromkeys([*new, *old]):
        if name not in new:
            steps.append(Edit("unset", owner, key(name), old[name], Unset(default(False, name))))
        elif name not in old:
            steps.append(Edit("set", owner, key(name), Unset(default(True, name)), new[name]))
        else:
            _compare(old[name], new[name], owner, key(name), steps)


def _compare_lists(old: list, new: list, path: str, steps: list[Edit]) -> None:
    matcher = difflib.SequenceMatcher(None, [_kind(item) for item in old], [_kind(item) for item in new], False)
    blocks = matcher.get_matching_blocks()
    pairs = {block.b + offset: block.a + offset for block in blocks for offset in range(block.size)}
    for index in sorted(set(range(len(old))) - set(pairs.values()), reverse=True):
        steps.append(Edit("remove", path, index, old[index], Unset(NOT_SET)))
    length = len(pairs)
    for index in range(len(new)):
        if index not in pairs:
            kind = "append" if index == length else "insert"
            steps.append(Edit(kind, path, index, Unset(NOT_SET), new[index]))
            length += 1
    for index, before in sorted(pairs.items()):
        _compare(old[before], new[index], path, index, steps)


def _kind(item: Any) -> str:
    """A key by which list items of two trees are matched: the class of a config, or the value itself."""
    if isinstance(item, fdl.Buildable):
        return f"{type(item).__qualname__} {qualified_name(item.__fn_or_cls__)}"
    return f"{type(item).__qualname__} {item!r}"


def _same_target(old: Any, new: Any) -> bool:
    both = isinstance(old, fdl.Buildable) and type(old) is type(new)
    return both and old.__fn_or_cls__ is new.__fn_or_cls__


def _has_positional(node: Any) -> bool:
    return any(isinstance(name, int) for name in node.__arguments__)


def _holds_configs(values: list) -> bool:
    return any(isinstance(item, fdl.Buildable) for item in values)


def _effective(value: Any) -> Any:
    return value.default if isinstance(value, Unset) else value


def _has_odd_names(tree: Any) -> bool:
    names = (name for _, node in iterate_nodes(tree) for name in node.__arguments__ if isinstance(name, str))
    return not all(map(is_plain_name, names))


def _differing_values(old: Any, new: Any, path: str) -> Iterator[tuple[str, str]]:
    """The effective values that two configs of different classes both have and that differ."""
    before, after = flatten(old, defaults=True), flatten(new, defaults=True)
    for step, value in before.items():
        if step in after and not step.endswith(TARGET) and not is_same(value, after[step]):
            yield "~", f"  {path}.{step}: {format_value(value)} -> {format_value(after[step])}"


def _statement(step: Edit, writer: Writer) -> str:
    """The step as Python code on a variable ``recipe``. Lines after the first are indented for a function's body."""
    owner = f"recipe.{step.owner}" if step.owner else "recipe"
    key = quoted(step.key) if isinstance(step.key, str) else repr(step.key)
    place = f"{owner}.{step.key}" if isinstance(step.key, Field) else f"{owner}[{key}]"
    if step.kind in ("unset", "remove"):
        return f"del {place}"
    value = writer.expression(step.new, step.path)
    if step.kind == "set":
        return f"{place} = {layout(value, 4, len(place) + 3)}"
    items = [("", value)] if step.kind == "append" else [("", str(step.key)), ("", value)]
    return layout(Group(f"{owner}.{step.kind}(", items, ")"), 4)
