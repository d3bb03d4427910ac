# SPDX-License-Identifier: Apache-2.0
"""Text from a command line before its field is known, and the types that annotations require."""

import ast
import collections.abc
import dataclasses
import enum
import pathlib
import types
import typing
from datetime import timedelta
from typing import Any

_CONSTANTS = {"none": None, "null": None, "true": True, "false": False}
SEQUENCES: dict[Any, Any] = {
    list: list,
    tuple: tuple,
    set: set,
    frozenset: frozenset,
    collections.abc.Sequence: list,
    collections.abc.MutableSequence: list,
    collections.abc.Iterable: list,
    collections.abc.Collection: list,
}
_PLAIN = (bool, int, float, str, pathlib.Path, pathlib.PurePath, timedelta, dict, object, type, Any)


class WrongType(ValueError):
    """The text doesn't fit the parameter's type. The message is the clause after the path: "takes a whole number, ..."."""


@dataclasses.dataclass(frozen=True)
class Text:
    """The typed text, and its value as a Python literal, or the text itself if it isn't a literal."""

    raw: str
    literal: Any

    @classmethod
    def parse(cls, raw: str) -> "Text":
        raw = raw.strip()
        if raw.lower() in _CONSTANTS and raw in (raw.lower(), raw.capitalize()):
            return cls(raw, _CONSTANTS[raw.lower()])
        try:
            return cls(raw, ast.literal_eval(raw))
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return cls(raw, _bare_list(raw))


def _bare_list(raw: str) -> Any:
    """`[a, b]` without quotes as a list, any other text as itself."""
    if not (raw.startswith("[") and raw.endswith("]")):
        return raw
    return [Text.parse(part).literal for part in split_items(raw[1:-1])]


def split_items(text: str) -> list[str]:
    """Text split at the commas outside brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote or letter in "'\"":
            quote = "" if letter == quote else quote or letter
        else:
            depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def unclosed(text: str) -> str:
    """The last bracket outside quotes that ``text`` opens and doesn't close. Empty: there is none."""
    opened, quote = "", ""
    for letter in text:
        if quote or letter in "'\"":
            quote = "" if letter == quote else quote or letter
        elif letter in "([{":
            opened += letter
        elif letter in ")]}":
            opened = opened[:-1]
    return opened[-1:]


def part_classes(hint: Any) -> tuple[type, ...]:
    """The classes whose objects a parameter takes, itself or in a list, if the parameter can't take text.

    Empty for a parameter that can take text (str, a path, a dtype, a choice of words), and without an annotation.
    """
    hint = without_annotated(hint)
    origin, choices = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType) or origin in SEQUENCES:
        classes_of_choices = [
            part_classes(choice) for choice in choices if choice not in (type(None), bool, int, float, ...)
        ]
        return (
            tuple(dict.fromkeys(cls for classes in classes_of_choices for cls in classes))
            if all(classes_of_choices)
            else ()
        )
    plain = not isinstance(hint, type) or origin is not None or hint in SEQUENCES
    if (
        plain
        or hint in _PLAIN
        or issubclass(hint, enum.Enum)
        or hint.__module__ in ("torch", "builtins", "collections.abc")
    ):
        return ()
    return (hint,)


def choices_of(hint: Any) -> list[Any]:
    """The members of a union but None, or the annotation itself."""
    hint = without_annotated(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [one for choice in typing.get_args(hint) for one in choices_of(choice)]
    return [] if hint is type(None) else [hint]


def without_annotated(hint: Any) -> Any:
    """The annotation under Annotated and NewType."""
    while True:
        if typing.get_origin(hint) is typing.Annotated:
            hint = typing.get_args(hint)[0]
        elif isinstance(hint, typing.NewType):
            hint = hint.__supertype__
        else:
            return hint
