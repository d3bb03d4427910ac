# SPDX-License-Identifier: Apache-2.0
"""Values that can't be of their parameter's type: text for a number, a number for a part or for a list.

Only certain mistakes are found. None, configs and objects fit everywhere, and so does every value where an annotation also
allows text, says nothing, or names a type of another library.
"""

import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Optional

from fiddle._src import signatures

from nemo2.config.typed_text import SEQUENCES, part_classes, without_annotated

_NUMBERS = {bool: "True or False", int: "a whole number", float: "a number"}
_LISTS = {one for one, kind in SEQUENCES.items() if kind in (list, tuple)}


def misfits(target: Callable[..., Any], arguments: Mapping[Any, Any]) -> Iterator[tuple[str, Any, str]]:
    """Name, value, and the type that ``target`` takes, of each argument that can't be of this type."""
    hints = signatures.get_type_hints(target)
    for name, value in arguments.items():
        hint = hints.get(name, Any)
        items = isinstance(value, list | tuple) and bool(part_classes(hint))
        for number, one in enumerate(value if items else [value]):
            if (wanted := _wanted(hint, one)) is not None:
                yield f"{name}[{number}]" if items else str(name), one, wanted


def _wanted(hint: Any, value: Any) -> Optional[str]:
    """What the annotation takes, if ``value`` is certainly nothing of it. None: it may be."""
    choices = _choices(hint)
    if choices and all(choice in _NUMBERS for choice in choices):
        wrong = isinstance(value, str | bytes | list | tuple | dict | set)
        taken = [choice for choice in choices if choice is not int or float not in choices]
        return _listed(_NUMBERS[choice] for choice in taken) if wrong else None
    if (
        choices
        and all((typing.get_origin(choice) or choice) in _LISTS for choice in choices)
        and not part_classes(hint)
    ):
        return "a list" if isinstance(value, str | int | float) else None
    if all(choice not in _NUMBERS for choice in choices) and (classes := part_classes(hint)):
        wrong = isinstance(value, int | float) and not isinstance(value, classes)
        return _listed(f"a {cls.__qualname__}" for cls in classes) if wrong else None
    return None


def _choices(hint: Any) -> list[Any]:
    """The members of a union but None, or the annotation itself."""
    hint = without_annotated(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [one for choice in typing.get_args(hint) for one in _choices(choice)]
    return [] if hint is type(None) else [hint]


def _listed(words: typing.Iterable[str]) -> str:
    return " or ".join(dict.fromkeys(words))
