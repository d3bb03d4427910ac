# SPDX-License-Identifier: Apache-2.0
"""Applies settings from a command line, such as `trainer.max_steps=100`, to a recipe.

A path leads through parameters and their aliases, list indices and dict keys. A value is parsed like a Python value and
must fit the annotation of its parameter. `+= -= *= /=` change the current value. Where an object is required, a
factory's name creates it: `log=default_log`, `optim=distributed_fused_adam_with_cosine_annealing(max_lr=1e-4)`.
"""

import contextlib
import operator
import re
import shlex
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Optional

import fiddle as fdl
from fiddle._src import signatures

from nemo2.base.counts import counted
from nemo2.base.errors import ConfigError, UnknownNameError
from nemo2.base.names import ABBREVIATIONS, sentence
from nemo2.config.aliases import aliases_of, decided_elsewhere, parameter_names
from nemo2.config.capture import unknown_name
from nemo2.config.factories import factory_names
from nemo2.config.located import recorded_at
from nemo2.config.show import format_value, holds_configs, value_in_effect
from nemo2.config.tree import Config, Partial, bring_up_to_date
from nemo2.config.typed_text import Text, WrongType, part_classes, unclosed
from nemo2.config.value_types import type_hints
from nemo2.config.values import config_class, describe, is_mapping, item_type, typed
from nemo2.config.walk import iterate_nodes

COMMAND_LINE = "command line"
"""The file in a field's history for a value from an override. The line is the override's number."""

_OVERRIDE = re.compile(r"\s*([A-Za-z_]\w*(?:\.\w+|\[[^\]]*\])*)\s*(\+=|-=|\*=|/=|=)(.*)", re.DOTALL)
_STEP = re.compile(r"\.?(\w+)|\[([^\]]*)\]")
_PATH = re.compile(rf"(?:{_STEP.pattern})+")
_OPERATIONS = {"+=": operator.add, "-=": operator.sub, "*=": operator.mul, "/=": operator.truediv}
_MISSING = object()
_PLAIN_WORD = re.compile(r"[A-Za-z_./][\w./:@+-]*")
"""Text that needs no quotes wherever text is allowed."""


class _Place(NamedTuple):
    """The location of a value: a field of a config, an item of a list or an entry of a dict."""

    owner: Any
    key: Any
    type_of_owner: Any = Any
    """The annotation of a list or dict."""

    def read(self) -> Any:
        if isinstance(self.owner, fdl.Buildable):
            return value_in_effect(self.owner, self.key, otherwise=_MISSING)
        if isinstance(self.owner, dict):
            return self.owner.get(self.key, _MISSING)
        return self.owner[self.key]

    def write(self, value: Any) -> None:
        if isinstance(self.owner, fdl.Buildable):
            setattr(self.owner, self.key, value)
        else:
            self.owner[self.key] = value

    def hint(self) -> Any:
        """The annotation of this location. `Any` if no annotation can be resolved."""
        if isinstance(self.owner, fdl.Buildable):
            return hint_of(self.owner, self.key)
        return item_type(self.type_of_owner, type(self.owner))


def hint_of(node: fdl.Buildable, name: str) -> Any:
    """The annotation of a config's field. `Any` if no annotation can be resolved."""
    target = node.__fn_or_cls__
    annotation = type_hints(target).get(name, Any)
    parameter = signatures.get_signature(target).parameters.get(name)
    # `x: str = None` is common in other packages' signatures.
    return annotation if parameter is None or parameter.default is not None else Optional[annotation]


def apply_overrides(recipe: Any, overrides: Iterable[str]) -> Any:
    """Apply each `path=value` in order, and return the recipe, which is changed in place.

    An unset sub-config is created if the annotation or the default names its class. The history names `COMMAND_LINE`
    and the number of the override.

    Args:
        recipe: The recipe.
        overrides: Texts such as `"trainer.max_steps=100"`.

    Raises:
        ConfigError: overrides can't be applied. The message lists all of them, and the recipe is unchanged.
    """
    failures: list[str] = []
    with _rollback(recipe):
        for number, override in _calls(recipe, list(overrides)):
            with recorded_at(COMMAND_LINE, number):
                try:
                    _apply(recipe, override)
                except (UnknownNameError, ConfigError, WrongType) as error:
                    failures.append(f"{override}: {_elsewhere(recipe, override, error)}")
        if len(failures) == 1:
            raise ConfigError(f"Override {failures[0]}")
        if failures:
            raise ConfigError(f"{len(failures)} overrides cannot be applied:\n  " + "\n  ".join(failures))
    return recipe


def apply_values(recipe: Any, values: Iterable[tuple[str, Any, int]], *, source: str) -> Any:
    """Apply the lines of a file in order, and return the recipe, which is changed in place.

    Args:
        values: Path, value and line of each change. A value without configs is applied like the corresponding override.
        source: The file's name, for errors and for the history.

    Raises:
        ConfigError: as in `apply_overrides`, with the line of each change.
    """
    failures: list[str] = []
    with _rollback(recipe):
        for path, value, line in values:
            override = as_override(path, value)
            with recorded_at(source, line):
                try:
                    if holds_configs(value):
                        _put(recipe, path, value)
                    else:
                        text = value if isinstance(value, str) else format_value(value)
                        _set(recipe, path, Text(text, value))
                except (UnknownNameError, ConfigError, WrongType) as error:
                    failures.append(f"{source}:{line}: {override}: {_elsewhere(recipe, override, error)}")
        if failures:
            raise ConfigError("\n".join(failures))
    return recipe


def takes_fields(recipe: Any, path: str) -> bool:
    """Whether a mapping at this path sets fields of a config: an existing config, or one that the field's type
    names."""
    with contextlib.suppress(ConfigError), _rollback(recipe, always=True):
        place = _find(recipe, path)
        value = place.read()
        return isinstance(value, fdl.Buildable) or (
            value in (None, _MISSING) and config_class(place.hint()) is not None
        )
    return True  # the errors of each field below report a wrong path


def carry_over(old: Any, new: Any) -> None:
    """Copy the fields that ``old``'s class lists as ``carried_over`` to ``new``, its replacement, unless ``new``
    sets them. The class of ``new`` may ``take_over`` more."""
    if not (isinstance(old, fdl.Buildable) and isinstance(new, fdl.Buildable)):
        return
    names = new.__signature_info__.valid_param_names
    for name in getattr(old.__fn_or_cls__, "carried_over", ()):
        value = getattr(old, name, None)
        if name in names and name not in new.__arguments__ and value is not None:
            setattr(new, name, value)
    if hook := getattr(new.__fn_or_cls__, "take_over", None):
        hook(old, new)


def as_override(path: str, value: Any) -> str:
    """The override that sets ``path`` to ``value``."""
    plain = isinstance(value, str) and _PLAIN_WORD.fullmatch(value) and Text.parse(value).literal == value
    return f"{path}={value if plain else format_value(value)}"


def in_shell(overrides: Iterable[str]) -> str:
    """Overrides as text for bash or zsh."""
    return " ".join(map(_in_shell, overrides))


def _in_shell(word: str) -> str:
    # Python's text has single quotes. Inside double quotes, which shlex doesn't use, the word stays legible.
    return f'"{word}"' if "'" in word and not set('"$`\\!') & set(word) else shlex.quote(word)


def _elsewhere(recipe: Any, override: str, error: Exception) -> str:
    """The error. For an unknown name, it also names a field of this name elsewhere in the recipe."""
    if not isinstance(error, UnknownNameError):
        return str(error)
    path, operation, value = split_override(override)
    *parents, name = path.split(".")
    if repr(name) not in str(error):  # the unknown name is inside the value
        return str(error)
    full = ABBREVIATIONS.get(name.lower(), name)
    paths = paths_of(recipe, full)
    if full != name and paths:
        return f"{str(error).partition(';')[0].rstrip('.')}. Write {paths[0]}{operation}{value}"
    if not paths:
        return str(error)
    write = " or ".join(f"{one}{operation}{value}" for one in paths)
    unknown = re.split(r"; |: it is a field of ", str(error), maxsplit=1)[0].rstrip(".")
    return f"{error} Write {write}" if parents and ";" in str(error) else f"{unknown}. Write {write}"


def paths_of(recipe: Any, name: str) -> list[str]:
    """The paths of the fields of this name in a recipe, shortest first, at most three. Fields that another part of the
    recipe decides are left out."""
    paths = [
        f"{place}.{name}".removeprefix(".")
        for place, node in iterate_nodes(recipe)
        if name in (*parameter_names(node.__fn_or_cls__), *aliases_of(node.__fn_or_cls__))
        and name != "name"
        and decided_elsewhere(node.__fn_or_cls__, name) is None
    ]
    return sorted(paths, key=lambda one: one.count("."))[:3]


def split_override(override: str) -> tuple[str, str, str]:
    """The path, operator and value text of an override.

    Raises:
        ConfigError: the override isn't of the form `path=value`.
    """
    match = _OVERRIDE.fullmatch(override)
    if match is None:
        raise ConfigError("this override is not of the form path=value, as in trainer.max_steps=100.")
    return match[1], match[2], match[3]


def _apply(recipe: Any, override: str) -> None:
    path, operation, raw = split_override(override)
    text = Text.parse(raw)
    if operation == "=":
        _set(recipe, path, text)
    else:
        place = _find(recipe, path)
        current = place.read()
        if current is _MISSING or current is None:
            raise ConfigError(f"{path} is not set, so {operation} has no value to change. Use {path}=...")
        numbers = all(isinstance(side, int | float) and not isinstance(side, bool) for side in (current, text.literal))
        both_lists = isinstance(current, list) and isinstance(text.literal, list)
        both_text = isinstance(current, str) and isinstance(text.literal, str)
        if not (numbers or (operation == "+=" and (both_lists or both_text))):
            raise ConfigError(f"{path} is {current!r}, so {operation} {text.raw} cannot be applied to it.")
        try:
            result = _OPERATIONS[operation](current, text.literal)
        except ArithmeticError as error:
            raise ConfigError(f"{path} is {current!r}, so {operation} {text.raw} has no result: {error}.") from None
        if isinstance(current, int) and isinstance(result, float) and result.is_integer():
            result = int(result)
        _put(recipe, path, _fit(place, path, result, None))


def _set(recipe: Any, path: str, text: Text) -> None:
    value = _fit(_find(recipe, path), path, text.literal, text.raw)
    # A factory may return changes of the whole recipe instead of a config.
    for where, new in value.changes(recipe) if hasattr(type(value), "changes") else [(path, value)]:
        _put(recipe, where, new)


def _put(recipe: Any, path: str, value: Any) -> None:
    place = _find(recipe, path)
    carry_over(place.read(), value)
    place.write(value)


def _calls(recipe: Any, overrides: list[str]) -> list[tuple[int, str]]:
    """The overrides with their numbers, with `optim.name=f optim.lr=1` rewritten to the call `optim=f(lr=1)`.

    NeMo's documents write the name of a part's factory and its arguments as separate overrides, with the optimizer
    below the model. They are rewritten only if the part has no field `name`.
    """
    calls: dict[str, tuple[int, str, list[str]]] = {}
    numbered = list(enumerate(overrides, start=1))
    for number, text in numbered:
        match = _OVERRIDE.fullmatch(text)
        if match and match[2] == "=" and match[1].endswith(".name") and _is_factorys(recipe, match[1]):
            calls[match[1].removesuffix(".name")] = number, match[3].strip(), []
    rewritten = []
    for number, text in numbered:
        path, _, value = text.partition("=")
        part, _, name = path.strip().rpartition(".")
        if part not in calls:
            rewritten.append((number, text))
        elif name == "name":
            rewritten.append((number, part))
        elif _is_factorys(recipe, path.strip()):
            calls[part][2].append(f"{name}={value.strip()}")
        else:
            rewritten.append((number, text))
    return [(n, f"{t}={calls[t][1]}({', '.join(calls[t][2])})" if t in calls else t) for n, t in rewritten]


def _is_factorys(recipe: Any, path: str) -> bool:
    """Whether the last name of a path isn't a field of its config, and a factory could create the config."""
    part, _, name = path.rpartition(".")
    with contextlib.suppress(ConfigError), _rollback(recipe, always=True):
        place = _find(recipe, part)
        is_field = name in getattr(getattr(place.read(), "__signature_info__", None), "valid_param_names", ())
        return not is_field and bool(factory_names(part_classes(place.hint())))
    return False


def _find(recipe: Any, path: str) -> _Place:
    """The location at the end of a path. Missing configs along the path are created."""
    steps = _steps(path)
    if steps[0] == "recipe" and len(steps) > 1 and "recipe" not in parameter_names(recipe.__fn_or_cls__):
        steps = steps[1:]  # as a script calls it: recipe.trainer.max_steps
    container, kind = recipe, Any
    place = _Place(recipe, None)
    walked = ""
    while steps:
        step = steps.pop(0)
        if isinstance(container, fdl.Buildable) and isinstance(step, str):
            real = aliases_of(container.__fn_or_cls__).get(step, step)
            if "." in real:
                step, *rest = real.split(".")
                steps = [*rest, *steps]
            else:
                step = real
        place = _Place(container, _key(container, step, walked), kind)
        walked = f"{walked}[{step}]" if isinstance(step, int) else f"{walked}.{step}".removeprefix(".")
        if steps:
            container, kind = _enter(place, walked), place.hint()
    return place


def _steps(path: str) -> list[str | int]:
    if not _PATH.fullmatch(path):  # a key of a YAML file is any text
        raise ConfigError(f"{path!r} is not a path of fields, as trainer.max_steps is.")
    steps: list[str | int] = []
    for name, index in _STEP.findall(path):
        bare = index.strip().strip("'\"")
        if name:
            steps.append(name)
        else:
            steps.append(int(bare) if re.fullmatch(r"-?\d{1,9}", bare) else bare)
    return steps


def _key(container: Any, step: str | int, walked: str) -> Any:
    """The key of `step` in its container, if it is a valid key."""
    where = walked or "the recipe"
    if isinstance(container, fdl.Buildable):
        if isinstance(container, Config | Partial):
            bring_up_to_date(container)
        info = container.__signature_info__
        if step not in info.valid_param_names and not (info.has_var_keyword and isinstance(step, str)):
            raise unknown_name(container.__fn_or_cls__, str(step))
        return step
    if isinstance(container, list):
        if not isinstance(step, int):
            raise ConfigError(f"{where} is a list. Give the index of an item, as in {where}[0].")
        if not -len(container) <= step < len(container):
            raise ConfigError(f"{where} has {counted(len(container), 'item')}, so {where}[{step}] does not exist.")
        return step
    if isinstance(container, dict):
        return step if step in container or str(step) not in container else str(step)
    raise ConfigError(f"{where} is {container!r}, which has no {step!r}. Set {where} itself.")


def _enter(place: _Place, path: str) -> Any:
    """The config at a step of the path. Created if there is none."""
    value = place.read()
    if value is not _MISSING and value is not None:
        if isinstance(place.owner, fdl.Buildable) and place.key not in place.owner.__arguments__:
            place.write(value)  # a default, which must become an argument to keep changes
        return value
    cls = config_class(place.hint())
    if cls is None and not is_mapping(place.hint()):
        raise ConfigError(
            f"{path} is not set, and its type ({describe(place.hint())[0]}) does not name a single class to create. "
            f"Set {path} first, as in {path}={describe(place.hint())[1]}."
        )
    config: Any = {} if cls is None else Config(cls)
    place.write(config)
    return config


def _fit(place: _Place, path: str, value: Any, text: str | None) -> Any:
    hint = place.hint()
    raw = text or ""
    bracket = unclosed(raw)
    try:
        fitted = typed(value, hint, text=text)
        if hint is Any and bracket and fitted == raw and raw[0] in "([{":
            raise WrongType
    except WrongType as error:
        if bracket:
            raise WrongType(f"{bracket!r} is not closed in {text!r}. For example {path}={describe(hint)[1]}") from None
        if str(error).endswith("?"):  # with the nearest names
            raise
        raise WrongType(f"{sentence(str(error))} For example {path}={describe(hint)[1]}") from None
    current = place.read() if hint is Any else None
    if isinstance(current, float) and isinstance(fitted, int) and not isinstance(fitted, bool):
        return float(fitted)  # without an annotation, the current value shows that the field is a float
    return fitted


@contextlib.contextmanager
def _rollback(recipe: Any, *, always: bool = False) -> Iterator[None]:
    """Restore all parts of the recipe if the block raises, or with ``always`` in any case."""
    saved = [(part, list(part) if isinstance(part, list) else dict(part)) for part in _state(recipe)]
    keep = False
    try:
        yield
        keep = not always
    finally:
        if not keep:
            for part, before in saved:
                part.clear()
                part.extend(before) if isinstance(part, list) else part.update(before)


def _state(recipe: Any) -> Iterator[Any]:
    """The lists and dicts that a recipe consists of, each once: those in it, and those in which its configs keep their
    arguments, histories and defaults."""
    seen: set[int] = set()
    pending = [recipe]
    while pending:
        value = pending.pop()
        if not isinstance(value, fdl.Buildable | list | tuple | dict) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, fdl.Buildable):
            defaults = value.__dict__.get("_defaults", {})
            yield from (value.__arguments__, defaults, value.__argument_history__, *value.__argument_history__.values())
            pending += [*value.__arguments__.values(), *(default.value for default in defaults.values())]
        else:
            yield from () if isinstance(value, tuple) else (value,)
            pending += value.values() if isinstance(value, dict) else value
