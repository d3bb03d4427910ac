# SPDX-License-Identifier: Apache-2.0
"""Finds configs, their children, and the origin of a field in a recipe."""

from collections.abc import Iterator
from typing import Any

import fiddle as fdl
from fiddle import history

from nemo2.config.aliases import aliases_of
from nemo2.config.tree import Config, Partial, alias_owner, bring_up_to_date


def class_of(node: Any) -> Any:
    """The target that a config calls, usually a class. For a live object, its class."""
    return getattr(node, "__fn_or_cls__", type(node))


def node_at(recipe: Any, path: str) -> Any:
    """The node or value of a recipe at a path of fields, aliases and list indices ("trainer.callbacks[0]"). None: there is
    none."""
    node: Any = recipe
    for name in path.split("."):
        name, *indices = name.replace("]", "").split("[")
        node = getattr(node, name, None)
        for index in indices:
            try:
                node = node[int(index)]  # pyright: ignore[reportOptionalSubscript]  (None is no list: TypeError)
            except (IndexError, ValueError, TypeError):
                return None
    return node


def callbacks_of(trainer: Any) -> list[Any]:
    """A trainer's callbacks, configs or live objects. Lightning takes a single callback without a list."""
    callbacks = getattr(trainer, "callbacks", None)
    return list(callbacks) if isinstance(callbacks, list | tuple) else [] if callbacks is None else [callbacks]


def model_transforms(recipe: Any) -> list[tuple[str, Any]]:
    """What transforms the model of a recipe, nodes or live objects, each with its path: PEFT methods and functions. A run has
    one at most."""
    places = {"": recipe, "model.": getattr(recipe, "model", None)}
    callbacks = callbacks_of(getattr(recipe, "trainer", None))
    places |= {f"trainer.callbacks[{index}].": callback for index, callback in enumerate(callbacks)}
    transforms = [("peft", getattr(recipe, "peft", None))]
    transforms += [
        (f"{path}model_transform", getattr(owner, "model_transform", None)) for path, owner in places.items()
    ]
    return [(path, transform) for path, transform in transforms if transform is not None]


def peft_of(recipe: Any) -> tuple[str, Any]:
    """The PEFT method of a recipe, a node or a live object, and its path. It may stand where any transform does."""
    methods = (one for one in model_transforms(recipe) if hasattr(class_of(one[1]), "refuse_unknown_targets"))
    return next(methods, ("peft", None))


def select(root: Any, target: Any) -> list[Any]:
    """Return every config of `target` or a subclass in the tree, each once, parents first.

    Unlike nemo-run's `broadcast` it enters lists, tuples and dicts: `select(recipe, MyCallback)`.

    Args:
        root: A recipe, or a list, tuple or dict of configs.
        target: A class or function.
    """
    matches = []
    for _, node in iterate_nodes(root):
        fn_or_cls = node.__fn_or_cls__
        both_classes = isinstance(fn_or_cls, type) and isinstance(target, type)
        if fn_or_cls is target or (both_classes and issubclass(fn_or_cls, target)):
            matches.append(node)
    return matches


def iterate_nodes(root: Any) -> Iterator[tuple[str, Any]]:
    """`(path, config)` for every config in the tree, each once, parents first. The root's path is empty."""
    seen: set[int] = set()

    def visit(path: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, fdl.Buildable):
            if id(value) in seen:
                return
            seen.add(id(value))
            yield path, value
        for step, child in children(value):
            yield from visit(f"{path}{step}".removeprefix("."), child)

    yield from visit("", root)


def children(value: Any) -> list[tuple[str, Any]]:
    """`(".name" or "[index]", child)` for each child of a config, list, tuple or dict. Empty for any other value."""
    if isinstance(value, fdl.Buildable):
        bring_up_to_date(value)  # nemo-run's own nodes too, which leave live objects as they are
        arguments = fdl.ordered_arguments(value)
        return [(f".{key}" if isinstance(key, str) else f"[{key}]", child) for key, child in arguments.items()]
    if isinstance(value, list | tuple):
        return [(f"[{index}]", child) for index, child in enumerate(value)]
    if isinstance(value, dict):
        return [(f"[{key!r}]", child) for key, child in value.items()]
    return []


def place_of(config: Any, name: str) -> str:
    """The ``file:line`` that set a field last, as `who_set` knows it. "": the field has its default."""
    setters = who_set(config, name)
    return f"{setters[-1][0]}:{setters[-1][1]}" if setters else ""


def set_at(config: Any, name: str) -> str:
    """ " (set at file:line)" for a sentence about a field. "": the field has its default."""
    place = place_of(config, name)
    return f" (set at {place})" if place else ""


def who_set(config: Any, name: str) -> list[tuple[str, int, Any]]:
    """Return `(file, line, value)` for each time a field was set, oldest first. Empty: the field has its default.

    A value from the command line has the file `"command line"` and the number of the override as its line. A deleted
    value is fiddle's `DELETED` marker. Aliases are followed. Serialization drops the history.

    Args:
        config: A config.
        name: The name or alias of a parameter.
    """
    if isinstance(config, Config | Partial):
        if alias := aliases_of(config.__fn_or_cls__).get(name):
            config, name = alias_owner(config, name, alias)
        bring_up_to_date(config)
    entries = config.__argument_history__.get(name, [])
    return [
        (entry.location.filename, entry.location.line_number, entry.new_value)
        for entry in entries
        if entry.kind is history.ChangeKind.NEW_VALUE
    ]
