# SPDX-License-Identifier: Apache-2.0
"""Values that can't be of their parameter's type: text for a number, a number for a part or for a list.

Only certain mistakes are found. None, configs and objects fit everywhere, and so does every value where an annotation also
allows text, says nothing, or names a type of another library.
"""

import inspect
import os
import typing
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Optional, Union

import fiddle as fdl
from fiddle._src import signatures

from nemo2.base.errors import ConfigError
from nemo2.base.names import a
from nemo2.config.aliases import parameters_of
from nemo2.config.typed_text import SEQUENCES, choices_of, part_classes, without_annotated

_NUMBERS = {bool: "True or False", int: "a whole number", float: "a number"}
_LISTS = {one for one, kind in SEQUENCES.items() if kind in (list, tuple)}
_KINDS: Sequence[tuple[set[Any], str, Callable[[Any, bool], bool]]] = (
    (
        {str},
        "text",
        lambda value, strict: (
            not isinstance(value, str | os.PathLike) if strict else isinstance(value, int | float | list | tuple)
        ),
    ),
    ({str, Path}, "a path", lambda value, _: not isinstance(value, str | os.PathLike)),
    ({Callable}, "a function", lambda value, _: not callable(value)),
    (_LISTS, "a list", lambda value, _: isinstance(value, str | int | float | dict)),
    ({dict, Mapping}, "a dictionary", lambda value, _: not isinstance(value, Mapping)),
)
"""Annotations of one kind, what they take in words, and whether a value, strictly, is certainly nothing of it."""
_HINTS: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


def required(factory: Callable[..., Any]) -> list[str]:
    """The parameters of a function or class that have no default."""
    empty, listed = inspect.Parameter.empty, (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [name for name, one in parameters_of(factory).items() if one.default is empty and one.kind not in listed]


def type_hints(target: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of ``target``'s parameters by name, resolved once. Empty: it has none, or one can't be resolved.

    fiddle has a cache for them which stays empty, because it asks for weak references to tuples.
    """
    try:
        if (hints := _HINTS.get(target)) is None and (hints := signatures.get_type_hints(target)):
            _HINTS[target] = hints
    except TypeError:  # no key of a dictionary, or nothing that can be referred to weakly
        hints = signatures.get_type_hints(target)
    return hints


def misfits(
    target: Callable[..., Any], arguments: Mapping[Any, Any], *, strict: bool = False
) -> Iterator[tuple[str, Any, str]]:
    """Name, value, and the type that ``target`` takes, of each argument that can't be of this type.

    ``strict``: 3.0 is no whole number, and text no part. False: in recipes, where a schedule of 1e4 steps is usual and text
    may name a part, other rules judge both.
    """
    hints = type_hints(target)
    for name, value in arguments.items():
        hint = hints.get(name, Any)
        items = _item_hint(hint) if isinstance(value, list | tuple) else None
        for number, one in enumerate([value] if items is None else value):
            if (
                wanted := _wanted(hint if items is None else items, one, strict=strict, item=items is not None)
            ) is not None:
                yield str(name) if items is None else f"{name}[{number}]", one, wanted


def mistyped(target: Callable[..., Any], arguments: Mapping[str, Any], *, of: str = "") -> dict[str, str]:
    """A sentence for each argument that isn't of its type, strictly, or is None where no None belongs, by its name.

    ``of``: the object whose arguments they are. "": they have no owner.
    """
    wrong = [
        *misfits(target, arguments, strict=True),
        *((name, None, words) for name, words in nones(target, arguments)),
    ]
    owner = f"{of}." if of else ""
    return {
        name: f"{owner}{name}={value!r}: takes {wanted}, not {type(value).__name__}." for name, value, wanted in wrong
    }


def refuse_misfits(
    target: Callable[..., Any], arguments: Mapping[str, Any], *, of: str = "", ordered: Sequence[str] = ()
) -> None:
    """Refuse arguments of a call that aren't of their type: those that the rules of a recipe refuse, and None and 3.0 where
    a number belongs, which recipes leave to the tables of domains.

    Args:
        of: The object whose arguments they are, for the error. "": they have no owner.
        ordered: The parameters whose arguments have no names in the call, in order.

    Raises:
        ConfigError: the message lists all of them.
    """
    model = arguments.get("model")
    if isinstance(model, str) and os.path.isdir(model):  # a checkpoint may stand for its model
        arguments = {name: value for name, value in arguments.items() if name != "model"}
    if not (problems := mistyped(target, arguments, of=of)):
        return
    lines = [*problems.values()]
    if not {name.partition("[")[0] for name in problems}.isdisjoint(ordered[1:]):
        parameters = inspect.signature(target).parameters.values()
        order = [parameter.name for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY]
        shown = ", ".join(order[: len(ordered) + 1]) + (", ..." if len(order) > len(ordered) + 1 else "")
        lines.append(f"Arguments without a name stand in this order: {target.__name__}({shown}).")
    raise ConfigError("\n".join(lines), rule="values-have-their-types")


def nones(target: Callable[..., Any], arguments: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
    """Name of each argument that is None, and the number, switch or part that ``target`` takes in its place and None of."""
    hints = type_hints(target)
    for name in (name for name, value in arguments.items() if value is None):
        if (wanted := _in_place_of_none(hints.get(name))) is not None:
            yield str(name), wanted


def _in_place_of_none(hint: Any) -> Optional[str]:
    hint = without_annotated(hint)
    if choices_of(hint) != [hint]:
        return None
    return _NUMBERS.get(hint) or _parts(part_classes(hint)) or None


def _wanted(hint: Any, value: Any, *, strict: bool, item: bool) -> Optional[str]:
    """What the annotation takes, if ``value`` is certainly nothing of it. None: it may be.

    ``item``: the value is one of a list, where neither None nor a further list is a part.
    """
    choices, classes = choices_of(hint), part_classes(hint)
    if item and (value is None or (classes and isinstance(value, list | tuple))):
        return _parts(classes) or ("text" if hint is str else _in_place_of_none(hint))
    if value is None or isinstance(value, fdl.Buildable):
        return None
    literals = [choice for choice in choices if typing.get_origin(choice) is typing.Literal]
    numbers = [choice for choice in choices if choice not in literals]
    if numbers and all(choice in _NUMBERS for choice in numbers):
        texts = [text for choice in literals for text in typing.get_args(choice)]
        taken = [_NUMBERS[choice] for choice in numbers if choice is not int or float not in numbers]
        is_wrong = value not in texts if isinstance(value, str) else _is_no_number(choices, value, strict=strict)
        return _listed([*taken, *map(repr, texts)]) if is_wrong else None
    kinds = {typing.get_origin(choice) or choice for choice in choices}
    for annotations, words, wrong in _KINDS if kinds and not classes else ():
        if kinds <= annotations:
            return words if wrong(value, strict) else None
    others = [choice for choice in choices if choice is not str]
    words = ["text"] if others and not classes and len(others) < len(choices) else []
    classes = part_classes(Union[tuple(others)]) if words else classes
    is_exact = len(classes) == len(choices) == 1 and is_dataclass(classes[0])
    doubtful = object if is_exact else (int, float, str, *(() if takes_a_list(hint) else (list, tuple)))
    fits = not isinstance(value, doubtful) or isinstance(value, classes if strict and not words else (str, *classes))
    return None if fits or not classes or _NUMBERS.keys() & kinds else _listed([*words, _parts(classes)])


def _is_no_number(choices: list[Any], value: Any, *, strict: bool) -> bool:
    """Whether a value but text is certainly none of these numbers and switches."""
    if isinstance(value, bool) and choices in ([int], [float]):
        return True
    if choices == [bool]:
        return value not in (0, 1)
    if choices == [int]:  # inf % 1 is no number
        return strict or value % 1 > 0 if isinstance(value, float) else not hasattr(value, "__index__")
    return isinstance(value, bytes | list | tuple | dict | set)


def _item_hint(hint: Any) -> Any:
    """The annotation of a list's items. None: the annotation may take other lists, or its items have several."""
    if part_classes(hint):
        return hint if takes_a_list(hint) else None
    lists = [choice for choice in choices_of(hint) if choice not in (str, *_NUMBERS)]
    items = {arg for choice in lists for arg in typing.get_args(choice) if arg is not ...}
    return items.pop() if len(items) == 1 and all(typing.get_origin(choice) in _LISTS for choice in lists) else None


def takes_a_list(hint: Any) -> bool:
    """Whether some values of this annotation are lists."""
    return any((typing.get_origin(choice) or choice) in SEQUENCES for choice in choices_of(hint))


def _parts(classes: typing.Iterable[type]) -> str:
    return _listed(a(cls.__qualname__) for cls in classes)


def _listed(words: typing.Iterable[str]) -> str:
    return " or ".join(dict.fromkeys(words))
