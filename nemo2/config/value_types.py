# SPDX-License-Identifier: Apache-2.0
"""Values that can't be of their parameter's type: text for a number, a number for a part or for a list.

Only certain mistakes are found. None, configs and objects fit everywhere, and so does every value where an annotation also
allows text, says nothing, or names a type of another library.
"""

import os
import types
import typing
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Optional, Union

from fiddle._src import signatures

from nemo2.base.errors import ConfigError
from nemo2.base.names import a
from nemo2.config.typed_text import SEQUENCES, part_classes, without_annotated

_NUMBERS = {bool: "True or False", int: "a whole number", float: "a number"}
_LISTS = {one for one, kind in SEQUENCES.items() if kind in (list, tuple)}
_HINTS: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


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


def misfits(target: Callable[..., Any], arguments: Mapping[Any, Any]) -> Iterator[tuple[str, Any, str]]:
    """Name, value, and the type that ``target`` takes, of each argument that can't be of this type."""
    hints = type_hints(target)
    for name, value in arguments.items():
        hint = hints.get(name, Any)
        classes = part_classes(hint)
        items = isinstance(value, list | tuple) and bool(classes) and _takes_a_list(hint)
        for number, one in enumerate(value if items else [value]):
            nothing = items and (one is None or isinstance(one, list | tuple))
            if (
                wanted := _listed(a(cls.__qualname__) for cls in classes) if nothing else _wanted(hint, one)
            ) is not None:
                yield f"{name}[{number}]" if items else str(name), one, wanted


def refuse_misfits(target: Callable[..., Any], arguments: Mapping[str, Any], *, of: str = "") -> None:
    """Refuse the arguments of a call in `exact_misfits`.

    Args:
        of: The object whose arguments they are, for the error. "": they have no owner.

    Raises:
        ConfigError: the message lists all of them.
    """
    if wrong := exact_misfits(target, arguments):
        owner = f"{of}." if of else ""
        lines = [f"{owner}{name}={value!r}: takes {wanted}." for name, (value, wanted) in wrong.items()]
        raise ConfigError("\n".join(lines), rule="values-have-their-types")


def exact_misfits(target: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Value and type by name of arguments that aren't of their type: those of `misfits`, and what a recipe's rules leave to
    the tables of domains: fractions and booleans for whole numbers, items of lists, no object for a part, no function."""
    hints = type_hints(target)
    wrong = {name: (value, wanted) for name, value, wanted in misfits(target, arguments)}
    for name, value in arguments.items():
        if (wanted := _exactly(hints.get(name, Any), value)) is not None:
            wrong.setdefault(name, (value, wanted))
    return wrong


def _exactly(hint: Any, value: Any) -> Optional[str]:
    """What the annotation takes, if ``value`` is nothing of it. None: it is, or the annotation is one of many kinds."""
    choices, classes = _choices(hint), part_classes(hint)
    if value is None and (choices != [hint] or not (hint in _NUMBERS or classes)):
        return None
    if choices == [int]:
        return None if hasattr(value, "__index__") and not isinstance(value, bool) else "a whole number"
    if choices == [bool]:
        return None if value in (0, 1) else "True or False"
    if set(choices) == {str, Path}:
        return None if isinstance(value, str | os.PathLike) else "a path"
    if choices and all(typing.get_origin(choice) is Callable for choice in choices):
        return None if callable(value) else "a function"
    if len(classes) == len(choices) == 1 and is_dataclass(classes[0]):
        return None if isinstance(value, classes) else a(classes[0].__qualname__)
    if choices and all(typing.get_origin(choice) in _LISTS for choice in choices):
        if not isinstance(value, list | tuple):
            return "a list" if isinstance(value, str | int | float | dict) else None
        item = typing.get_args(choices[0])[0]
        text = item is str and any(not isinstance(one, str | os.PathLike) for one in value)
        word = "text" if text else next((word for one in value if (word := _exactly(item, one)) is not None), None)
        return word and f"a list whose items are each {word}"
    return None


def nones(target: Callable[..., Any], arguments: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
    """Name of each argument that is None, and the number or switch that ``target`` takes in its place and None of."""
    hints = type_hints(target)
    for name in (name for name, value in arguments.items() if value is None):
        if (wanted := _NUMBERS.get(without_annotated(hints.get(name)))) is not None:
            yield str(name), wanted


def _wanted(hint: Any, value: Any) -> Optional[str]:
    """What the annotation takes, if ``value`` is certainly nothing of it. None: it may be."""
    choices = _choices(hint)
    literals = [choice for choice in choices if typing.get_origin(choice) is typing.Literal]
    texts = [text for choice in literals for text in typing.get_args(choice)]
    numbers = [choice for choice in choices if choice not in literals]
    if numbers and all(choice in _NUMBERS for choice in numbers):
        wrong = isinstance(value, str | bytes | list | tuple | dict | set) and value not in texts
        taken = [choice for choice in numbers if choice is not int or float not in numbers]
        return _listed([*(_NUMBERS[choice] for choice in taken), *map(repr, texts)]) if wrong else None
    if choices == [str]:
        return "text" if isinstance(value, int | float | list | tuple) else None
    classes = part_classes(hint)
    if not classes and choices and all((typing.get_origin(choice) or choice) in _LISTS for choice in choices):
        return "a list" if isinstance(value, str | int | float) else None
    if any(choice in _NUMBERS for choice in choices):
        return None
    words, others = [], [choice for choice in choices if choice is not str]
    if not classes and len(others) < len(choices) and others:
        words, classes = ["text"], part_classes(Union[tuple(others)])
    lists = () if _takes_a_list(hint) else (list, tuple)
    wrong = isinstance(value, (int, float, *lists)) and not isinstance(value, classes)
    return _listed([*words, *(a(cls.__qualname__) for cls in classes)]) if classes and wrong else None


def _takes_a_list(hint: Any) -> bool:
    return any((typing.get_origin(choice) or choice) in SEQUENCES for choice in _choices(hint))


def _choices(hint: Any) -> list[Any]:
    """The members of a union but None, or the annotation itself."""
    hint = without_annotated(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [one for choice in typing.get_args(hint) for one in _choices(choice)]
    return [] if hint is type(None) else [hint]


def _listed(words: typing.Iterable[str]) -> str:
    return " or ".join(dict.fromkeys(words))
