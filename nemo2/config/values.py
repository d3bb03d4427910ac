# SPDX-License-Identifier: Apache-2.0
"""Converts values from a command line to the type of a parameter."""

import collections.abc
import contextlib
import dataclasses
import enum
import inspect
import pathlib
import re
import types
import typing
from datetime import timedelta
from typing import Any

from nemo2.base.names import a, did_you_mean, shortened
from nemo2.config.arguments import requested_classes
from nemo2.config.capture import is_configurable
from nemo2.config.dtypes import named_dtype
from nemo2.config.factories import factory_names, made_by_name
from nemo2.config.policy import named_object
from nemo2.config.typed_text import SEQUENCES, WrongType, choices_of, without_annotated

MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def typed(value: Any, hint: Any, *, text: str | None = None) -> Any:
    """`value` converted to `hint`.

    Args:
        value: A Python value, parsed from the text.
        hint: A type annotation. `Any`, an unresolved name or a type without a known rule accepts the value unchanged.
        text: The text, if it is a whole value. Parameters of type text receive it unparsed.

    Raises:
        WrongType: the value can't be converted without guessing.
    """
    hint = without_annotated(hint)
    origin, choices = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(value, str) and (classes := requested_classes(value, hint)):
        return made_by_name(value, classes, fit=typed)
    if hint is Any or isinstance(hint, str | typing.TypeVar | typing.ForwardRef) or hint is inspect.Parameter.empty:
        return value
    if origin in (typing.Union, types.UnionType):
        return _one_of(value, choices, text)
    if origin is typing.Literal:
        return _literal(value, choices, text)
    if hint is None or hint is type(None):
        if value is None:
            return None
        raise WrongType(f"takes None, not {_shown(value, text)}")
    container = origin or hint
    if rule := _RULES.get(container):
        return rule(value, text)
    if container in SEQUENCES:
        return _sequence(value, SEQUENCES[container], choices, text)
    if container in MAPPINGS:
        return _mapping(value, choices, text)
    if container in (collections.abc.Callable, type):
        return _callable(value, hint, text)
    if isinstance(container, type):
        return _instance(value, container, text)
    return value


def describe(hint: Any) -> tuple[str, str]:
    """A parameter's type in words, and an example of a value: `("a whole number", "100")`."""
    hint = without_annotated(hint)
    origin, choices = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        parts = [describe(choice) for choice in choices]
        words = list(dict.fromkeys(word for word, _ in parts))
        return " or ".join(words), parts[0][1]
    if origin is typing.Literal:
        return "one of " + ", ".join(str(choice) for choice in choices), str(choices[0])
    if origin in SEQUENCES or hint in SEQUENCES:
        item = describe(choices[0])[1] if choices else "1"
        return "a list", f"[{item}]"
    container = origin or hint
    if container in _IN_WORDS:
        return _IN_WORDS[container]
    if isinstance(container, type) and issubclass(container, enum.Enum):
        return f"one of {', '.join(container.__members__)}", next(iter(container.__members__))
    if _is_torch(container, "dtype"):
        return "a dtype", "torch.bfloat16"
    if container is collections.abc.Callable:
        return "the dotted name of a function", "torch.nn.functional.gelu"
    if isinstance(container, type):
        return f"a {container.__qualname__}", _example(container)
    return str(hint), "..."


def config_class(hint: Any) -> type | None:
    """The configurable class that an annotation names, also through Optional and Union. None: it names none, or
    several."""
    hint = without_annotated(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        classes = {cls for choice in typing.get_args(hint) if (cls := config_class(choice)) is not None}
        return classes.pop() if len(classes) == 1 else None
    hint = typing.get_origin(hint) or hint
    if isinstance(hint, type) and (dataclasses.is_dataclass(hint) or is_configurable(hint)):
        return None if inspect.isabstract(hint) else hint
    return None


def is_mapping(hint: Any) -> bool:
    """Whether an annotation names a dict, also through Optional and Union."""
    return any((typing.get_origin(choice) or choice) in MAPPINGS for choice in choices_of(hint))


def item_type(hint: Any, kind: type) -> Any:
    """The annotation of the items in a list or dict (``kind``) of a parameter. `Any` if none can be told."""
    hint = without_annotated(hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        items = tuple(item for choice in arguments if (item := item_type(choice, kind)) is not Any)
        return typing.Union[items] if items else Any
    if kind is dict:
        return arguments[1] if origin in MAPPINGS and len(arguments) == 2 else Any
    return arguments[0] if SEQUENCES.get(origin) is list and arguments else Any


def _one_of(value: Any, choices: tuple, text: str | None) -> Any:
    if value is None and type(None) in choices:
        return None
    choices = tuple(choice for choice in choices if choice is not type(None))
    # A choice that needs no conversion comes first: `devices=8` of Union[list[int], str, int] is an int.
    for choice in choices:
        if (
            type(value) is (typing.get_origin(without_annotated(choice)) or without_annotated(choice))
            and type(value) is not str
        ):
            return typed(value, choice, text=text)
    if len(choices) == 1:
        return typed(value, choices[0], text=text)
    # str accepts any text, so it comes last
    for choice in sorted(choices, key=lambda choice: without_annotated(choice) is str):
        with contextlib.suppress(WrongType):
            return typed(value, choice, text=text)
    raise WrongType(f"takes {describe(typing.Union[choices])[0]}, not {_shown(value, text)}")


def _literal(value: Any, choices: tuple, text: str | None) -> Any:
    for choice in choices:
        if (type(choice) is type(value) and choice == value) or (isinstance(choice, str) and choice == text):
            return choice
    texts = [choice for choice in choices if isinstance(choice, str)]
    hint = did_you_mean(str(text if text is not None else value), texts, listed=True).rstrip(".")
    listed = ", ".join(repr(choice) for choice in choices)
    raise WrongType(f"takes one of {listed}, not {_shown(value, text)}{hint}")


def _bool(value: Any, text: str | None) -> bool:
    if isinstance(value, bool):
        return value
    raise WrongType(f"takes true or false, not {_shown(value, text)}")


def _int(value: Any, text: str | None) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    raise WrongType(f"takes a whole number, not {_shown(value, text)}")


def _float(value: Any, text: str | None) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number or (isinstance(value, str) and value.lower() in ("inf", "-inf")):
        with contextlib.suppress(OverflowError):
            return float(value)
    raise WrongType(f"takes a number, not {_shown(value, text)}")


def _str(value: Any, text: str | None) -> str:
    if isinstance(value, str):
        return value
    if text is None:
        raise WrongType(f"takes text, not {_shown(value, text)}")
    return text


def _path(value: Any, text: str | None) -> pathlib.Path:
    if isinstance(value, pathlib.Path):
        return value
    if not (written := _str(value, text)):
        raise WrongType("takes a path, not an empty text, which would be the working directory")
    return pathlib.Path(written)


def _timedelta(value: Any, text: str | None) -> timedelta:
    if isinstance(value, timedelta):
        return value
    source = text if text is not None else str(value)
    with contextlib.suppress(OverflowError, ValueError):  # too long for a time span, infinite, or too many digits
        if isinstance(value, int | float) and not isinstance(value, bool):
            return timedelta(seconds=value)
        if match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd])", source):
            return timedelta(**{_UNITS[match[2]]: float(match[1])})
        if match := re.fullmatch(r"(?:(\d+):)?(\d+):(\d+):(\d+)", source):  # Lightning's DD:HH:MM:SS, days optional
            days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
            return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    raise WrongType(f"takes a time span such as 90s, 15m, 2h or 1:30:00, not {_shown(value, text)}")


def _sequence(value: Any, make: Any, items: tuple, text: str | None) -> Any:
    if not isinstance(value, list | tuple | set):
        raise WrongType(f"takes a list such as [1,2], not {_shown(value, text)}")
    if make is tuple and items and Ellipsis not in items:
        if len(items) != len(value):
            raise WrongType(f"takes {len(items)} values, not {_shown(value, text)}")
        return tuple(typed(item, hint) for item, hint in zip(value, items, strict=True))
    return make(typed(item, items[0]) if items else item for item in value)


def _mapping(value: Any, items: tuple, text: str | None) -> dict:
    if not isinstance(value, dict):
        raise WrongType(f"takes a dict such as {{'key': 1}}, not {_shown(value, text)}")
    if len(items) != 2:
        return value
    return {typed(key, items[0]): typed(item, items[1]) for key, item in value.items()}


def _callable(value: Any, hint: Any, text: str | None) -> Any:
    if callable(value):
        return value
    if not isinstance(value, str):
        raise WrongType(f"takes the dotted name of a function, not {_shown(value, text)}")
    return named_object(value)


def _instance(value: Any, cls: type, text: str | None) -> Any:
    """`value` for a parameter of any other class: an enum's member, a dtype, a config of a named class, or the value
    itself."""
    if isinstance(value, cls):
        return value
    if issubclass(cls, enum.Enum):
        for member in cls:
            if member.name == text or member.value == value or member.name == value:
                return member
        raise WrongType(f"takes one of {', '.join(cls.__members__)}, not {_shown(value, text)}")
    if _is_torch(cls, "dtype"):
        if (dtype := named_dtype(str(value))) is not None:
            return dtype
        raise WrongType(f"takes a dtype such as torch.bfloat16 or bf16, not {_shown(value, text)}")
    if _is_torch(cls, "device") and isinstance(value, str):
        return cls(value)
    raise WrongType(
        f"takes {a(cls.__qualname__)}, not {_shown(value, text)}. Set its fields, or name one of its classes"
    )


def _example(cls: type) -> str:
    """A name that makes an object of `cls`: a factory, else a class that isn't abstract."""
    if names := factory_names([cls]):
        return names[0]
    while inspect.isabstract(cls) and cls.__subclasses__():
        cls = min(cls.__subclasses__(), key=inspect.isabstract)
    return f"{cls.__module__}.{cls.__qualname__}"


def _is_torch(cls: Any, name: str) -> bool:
    return getattr(cls, "__module__", None) == "torch" and getattr(cls, "__qualname__", None) == name


def _shown(value: Any, text: str | None) -> str:
    return shortened(repr(value if text is None else text))


_RULES: dict[Any, Any] = {
    bool: _bool,
    int: _int,
    float: _float,
    str: _str,
    pathlib.Path: _path,
    pathlib.PurePath: _path,
    timedelta: _timedelta,
}
_IN_WORDS: dict[Any, tuple[str, str]] = {
    bool: ("true or false", "true"),
    int: ("a whole number", "100"),
    float: ("a number", "0.1"),
    str: ("text", "name"),
    pathlib.Path: ("a path", "/data/run"),
    timedelta: ("a time span", "90s"),
    dict: ("a dict", "{'key': 1}"),
    type(None): ("None", "null"),
}
