# SPDX-License-Identifier: Apache-2.0
"""Parts of a recipe by name: `log=default_log`, `optim=distributed_fused_adam_with_cosine_annealing(max_lr=1e-4)`.

A factory is a function that returns a config, or a class to make a config of. Higher packages announce their factories.
Factories registered with nemo-run (`@run.cli.factory`) are found too. A parameter's annotation decides which factories
fit.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any, NamedTuple, Optional, get_args

import fiddle as fdl

from nemo2.base.errors import ConfigError
from nemo2.base.names import a, did_you_mean, nearest, sentence
from nemo2.config.aliases import parameters_of
from nemo2.config.announced import ANNOUNCED
from nemo2.config.capture import unknown_name
from nemo2.config.tree import Config
from nemo2.config.typed_text import Text, WrongType, part_classes, split_items, without_annotated
from nemo2.config.value_types import takes_a_list, type_hints

_CALL = re.compile(r"([A-Za-z_]\w*(?:[.:]\w+)*)\s*(?:\((.*)\))?", re.DOTALL)


class Source(NamedTuple):
    """Factories of one kind of part."""

    gives: str
    """The class that the factories' configs build, as "module:Class"; imported at the first look-up."""
    names: Callable[[], Iterable[str]]
    load: Callable[[str], Callable[..., Any]]
    """The function or class of that name."""


def factory_names(classes: Iterable[type]) -> list[str]:
    """The names of all factories that make objects of these classes, in alphabetical order."""
    return sorted({name for source in _fitting(classes) for name in source.names()}, key=str.lower)


def made_by_name(text: str, classes: tuple[type, ...], *, fit: Callable[..., Any]) -> Any:
    """The value of the factory call ``text``: a config, or changes of a recipe (an object with ``changes``).

    Args:
        text: ``name`` or ``name(argument=value, ...)``, with values as in an override. The name may be the dotted name
            of a class.
        classes: The classes that the factory may make.
        fit: `nemo2.config.values.typed`, for the arguments.

    Raises:
        WrongType: there is no such factory of these classes.
        ConfigError: its arguments don't fit.
    """
    match = _CALL.fullmatch(text.strip())
    factory = _find(match[1], classes) if match else None
    if match is None or factory is None:
        raise WrongType(refusal(text, classes))
    if isinstance(factory, type):
        return Config(factory, **_arguments(factory, match[2] or "", fit))
    return called(factory, match[2] or "", fit=fit, name=match[1])


def called(factory: Callable[..., Any], text: str, *, fit: Callable[..., Any], name: str = "") -> Any:
    """The result of the function ``factory`` for the arguments ``text``, as in ``num_nodes=2, dir="runs"``.

    Args:
        fit: As in `made_by_name`.
        name: Its name for the user. "": its own name.

    Raises:
        ConfigError: the arguments don't fit, or a required argument is missing.
    """
    arguments = _arguments(factory, text, fit)
    if missing := [name for name in required(factory) if name not in arguments]:
        needed = ", ".join(f"{name}=..." for name in missing)
        raise ConfigError(f"{factory.__name__} requires {needed}. Write {name or factory.__name__}({needed}).")
    return factory(**arguments)


def refusal(text: str, classes: tuple[type, ...]) -> str:
    """The clause that says why ``text`` can't stand for an object of these classes, with the nearest names that can."""
    wanted = " or ".join(a(cls.__qualname__) for cls in classes)
    shown = repr(text) if len(text) <= 80 else f"{text[:77]!r}..."
    names = factory_names(classes)
    if not names:
        return f"takes {wanted}, not {shown}. Set its fields, or name one of its classes"
    name = _first_word(text)
    if name in names and (factory := _find(name, classes)) is not None:
        return f"takes {wanted}, but {shown} is text. Call {factory.__module__}.{factory.__qualname__} instead."
    nearest_names = did_you_mean(name, names)
    if nearest_names == ".":
        nearest_names = f"; known names include {', '.join(names[:4])}."
    return f"takes {wanted}, but {shown} does not name one{nearest_names}"


def misplaced_text(target: Callable[..., Any], arguments: Mapping[str, Any], *, of: str) -> list[str]:
    """A sentence for each text among these arguments of ``target`` that should be an object, also inside a list."""
    hints = type_hints(target)
    return [
        f"{of}{name}={text!r}: {refusal(text, classes)}"
        for name, value in arguments.items()
        for text in (value if isinstance(value, list | tuple) and takes_a_list(hints.get(name, Any)) else [value])
        if isinstance(text, str) and (classes := requested_classes(text, hints.get(name, Any)))
    ]


def requested_classes(text: str, hint: Any) -> tuple[type, ...]:
    """The classes of which ``text`` must name one, for a parameter with this annotation.

    Empty: the text may stand for itself. Where a parameter also takes text (``strategy: str | Strategy``), a word in
    capitals that is, or almost is, the name of a factory is meant as this name.
    """
    if classes := part_classes(hint):
        return classes
    classes = tuple(cls for choice in get_args(without_annotated(hint)) for cls in part_classes(choice))
    is_name = classes and text[:1].isupper() and nearest(_first_word(text), factory_names(classes))
    return classes if is_name else ()


def required(factory: Callable[..., Any]) -> list[str]:
    """The parameters of a function or class that have no default."""
    empty, listed = inspect.Parameter.empty, (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [name for name, one in parameters_of(factory).items() if one.default is empty and one.kind not in listed]


def missing_arguments(node: Any, path: str) -> Optional[str]:
    """A clause that names the arguments that the config at ``path`` lacks and its class has no default for. None: it
    lacks none, or it is a live object."""
    if not isinstance(node, fdl.Buildable):
        return None
    target = node.__fn_or_cls__
    missing = [name for name in required(target) if name not in node.__arguments__]
    if not missing:
        return None
    name = getattr(target, "__name__", str(target))
    settings = " and ".join(f"{path}.{one}" for one in missing)
    return f"{path}: {name} has no default for {' and '.join(missing)}. Set {settings}"


def _first_word(text: str) -> str:
    return re.split(r"\W", text.strip(), maxsplit=1)[0]


def _fitting(classes: Iterable[type]) -> list[Source]:
    """The sources of exactly these classes, if there are any, else those of subclasses. Optimizers and schedules are
    callbacks too, and would otherwise match."""
    wanted = tuple(classes)
    by_class: dict[type, list[Source]] = {}
    for source in (source for module in ANNOUNCED for source in import_module(module).SOURCES):
        home, _, name = source.gives.partition(":")
        cls = getattr(import_module(home), name)
        if issubclass(cls, wanted):
            by_class.setdefault(cls, []).append(source)
    exact = [cls for cls in by_class if cls in wanted]
    return [source for cls in exact or by_class for source in by_class[cls]]


def _find(name: str, classes: tuple[type, ...]) -> Optional[Callable[..., Any]]:
    if "." in name or ":" in name:
        from nemo2.config.policy import named_object  # text only: a rank builds objects

        named = named_object(name)
        return named if isinstance(named, type) and issubclass(named, classes) else None
    for source in _fitting(classes):
        if name in source.names():
            return source.load(name)
    # A factory that is registered with nemo-run for one of these classes.
    if "nemo_run.cli.api" not in sys.modules:
        return None
    import catalogue
    from nemo_run.config import get_type_namespace

    for cls in classes:
        if catalogue.check_exists(get_type_namespace(cls), name):
            return catalogue._get((get_type_namespace(cls), name))
    return None


def _arguments(factory: Callable[..., Any], text: str, fit: Callable[..., Any]) -> dict[str, Any]:
    """The keywords of a call, each converted as the factory's signature requires."""
    parameters = inspect.signature(factory).parameters
    hints = type_hints(factory)
    arguments: dict[str, Any] = {}
    for part in split_items(text):
        name, equals, value = part.partition("=")
        name, read = name.strip(), Text.parse(value)
        if not equals or not name.isidentifier():
            raise ConfigError(f"{part!r} is not of the form name=value. Name the argument of {factory.__name__}.")
        if name not in parameters:
            raise unknown_name(factory, name)
        hint = hints.get(name, Any)
        try:
            arguments[name] = fit(
                read.literal, hint if parameters[name].default is not None else Optional[hint], text=read.raw
            )
        except WrongType as error:
            raise ConfigError(sentence(f"{name} of {factory.__name__} {error}")) from None
    return arguments
