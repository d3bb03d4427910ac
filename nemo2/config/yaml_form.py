# SPDX-License-Identifier: Apache-2.0
"""Writes a recipe as YAML for people to edit, and reads YAML from untrusted sources.

A config is a mapping with its class as ``_target_``. A partial also has ``_partial_: true``. A class, function or dtype
as a value has ``_call_: false``, as in nemo-run's YAML. A config that is used in two places has an anchor at the first
and an alias at the second. A value is written as on a command line (``torch.bfloat16``, ``15m``) if the annotation of
its field restores the same value, and otherwise with ``_target_`` and ``_args_``.

As for JSON, `nemo2.config.policy` lists what a file may name.
"""

import enum
import pathlib
import re
import typing
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import fiddle as fdl
import yaml

from nemo2.base.errors import ConfigError, SecurityError
from nemo2.base.names import shortened
from nemo2.config.located import recorded_at
from nemo2.config.moved_names import module_today
from nemo2.config.overrides import apply_values, hint_of, takes_fields
from nemo2.config.policy import MOST_VALUES, RecipePolicy, has_at_most
from nemo2.config.provenance import is_same
from nemo2.config.serialize import check_serialisable
from nemo2.config.show import NOT_SET, TARGET, effective_children, format_value, qualified_name
from nemo2.config.tree import Config, Partial
from nemo2.config.typed_text import WrongType
from nemo2.config.values import typed
from nemo2.config.wire import constant_name

PARTIAL, CALL, ARGS = "_partial_", "_call_", "_args_"
_UNITS = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))
_PATHS = (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)
_VALUES: dict[str, Any] = {
    **{f"builtins.{kind.__name__}": kind for kind in (tuple, set, frozenset, list, dict, str, int, float, bool)},
    **{f"pathlib.{kind.__name__}": kind for kind in _PATHS},  # Python 3.13 defines them in another module
    "datetime.timedelta": timedelta,
}
"""Targets that accept ``_args_``, besides torch.device."""


class Mapping(dict[Any, Any]):
    """A mapping of a YAML file, with the line of each key."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[Any, int] = {}
        self.line = 0


def to_yaml(recipe: Any, *, defaults: bool = False) -> str:
    """Write the recipe as YAML that `from_yaml` reads back as an equal tree.

    Args:
        recipe: A tree of `Config` and `Partial`.
        defaults: Also write unset values.

    Raises:
        ConfigError: values have no textual form. The message lists all of them.
    """
    check_serialisable(recipe)
    return yaml.dump(_Writer(defaults).form(recipe), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def from_yaml(text: str | bytes, allowed_modules: Iterable[str] = (), *, source: str = "YAML") -> Any:
    """Read a recipe that `to_yaml` or a person wrote. Builds and calls nothing.

    Args:
        text: The YAML, from any source. It isn't trusted.
        allowed_modules: As in `nemo2.config.from_json`.
        source: The file's name, for errors and for the history of values.

    Raises:
        SecurityError: the file names something that isn't allowed. Nothing was imported for it.
        ConfigError: the text isn't a recipe in YAML. The message lists every unknown field and every wrong value with
            its line.
    """
    form = read(text, source)
    policy = RecipePolicy(allowed_modules)
    _check_names(form, policy)
    reader = _Reader(policy, source)
    tree = reader.value(form, "")
    if reader.problems:
        raise ConfigError("\n".join(reader.problems))
    if not isinstance(tree, fdl.Buildable):
        raise ConfigError(
            f"{source}: a recipe in YAML must be a mapping with _target_ (the form that `nemo2 show NAME --yaml` "
            "writes), or a mapping with `recipe: NAME` and changes below it."
        )
    policy.check(tree)
    return tree


def read(text: str | bytes, source: str) -> Any:
    """The mappings, lists and scalars of a YAML file. Scalars follow YAML 1.2: ``3e-4`` is a number, ``no`` is text.

    Raises:
        ConfigError: the text isn't YAML, or has a duplicate key, or endless aliases.
    """
    try:
        form = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = source if mark is None else f"{source}:{mark.line + 1}"
        what = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{where}: this is not YAML that a recipe can contain: {what}.") from error
    except (RecursionError, ValueError) as error:  # also an int of more digits than Python reads
        raise ConfigError(f"{source}: this is not YAML that a recipe can contain: {type(error).__name__}.") from error
    if not has_at_most(MOST_VALUES, form, _items):
        raise ConfigError(f"{source}: its aliases contain each other and add up to more than {MOST_VALUES} values.")
    return form


def apply_form(recipe: Any, form: Mapping, allowed_modules: Iterable[str] = (), *, source: str) -> Any:
    """Apply the changes in a mapping of `read`, and return the recipe, which is changed in place.

    A mapping with ``_target_`` replaces the current value. A mapping without it changes fields of the current value.
    Other values are applied like overrides, including aliases and names of factories.

    Raises:
        SecurityError: as in `from_yaml`.
        ConfigError: changes can't be made. The message lists each with its line, and the recipe is unchanged.
    """
    policy = RecipePolicy(allowed_modules)
    _check_names(form, policy)
    reader = _Reader(policy, source)

    def changes(part: Mapping, path: str) -> Iterator[tuple[str, Any, int]]:
        for name, value in part.items():
            where, line = f"{path}.{name}".removeprefix("."), part.lines.get(name, part.line)
            if isinstance(value, Mapping) and TARGET not in value and value and takes_fields(recipe, where):
                yield from changes(value, where)
            else:
                yield where, reader.value(value, where, line=line) if _has_mappings([value]) else value, line

    requested = list(changes(form, ""))
    if reader.problems:
        raise ConfigError("\n".join(reader.problems))
    for _, value, _ in requested:
        if isinstance(value, fdl.Buildable | list):
            policy.check(value)
    return apply_values(recipe, requested, source=source)


class _Writer:
    def __init__(self, defaults: bool) -> None:
        self.defaults = defaults
        self.written: dict[int, tuple[Any, Any]] = {}

    def form(self, value: Any, hint: Any = Any) -> Any:
        """The written form of ``value`` in a field with this annotation."""
        if not isinstance(value, fdl.Buildable | list | dict):
            return self._leaf(value, hint)
        if id(value) not in self.written:
            # The value is kept too, because an id is unique only while its object lives.
            self.written[id(value)] = (
                value,
                self._config(value) if isinstance(value, fdl.Buildable) else self._container(value, hint),
            )
        return self.written[id(value)][1]

    def _config(self, node: Any) -> dict[str, Any]:
        if not isinstance(node, Config | Partial):
            raise ConfigError(
                f"A {type(node).__name__} of {format_value(node)} cannot be written as YAML. Write recipe.json instead."
            )
        shown: dict[str, Any] = {TARGET: _name_of(node.__fn_or_cls__)}
        if isinstance(node, Partial):
            shown[PARTIAL] = True
        for step, child in effective_children(node, defaults=self.defaults):
            if not step.startswith("."):
                raise ConfigError(f"{format_value(node)} has an argument without a name. Write recipe.json instead.")
            if child is not NOT_SET:
                name = step[1:]
                try:
                    shown[name] = self.form(child, hint_of(node, name))
                except ConfigError:
                    if name in node.__arguments__:
                        raise
                    shown[name] = format_value(child)  # a default that has no other form; reading it says so
        return shown

    def _container(self, value: list[Any] | dict[Any, Any], hint: Any) -> Any:
        if isinstance(value, list):
            form: Any = [self.form(item) for item in value]
            return form if _has_mappings(form) or is_same(_read_back(form, hint), value) else _explicit(value, [form])
        form = {key: self.form(item) for key, item in value.items()}
        plain = all(type(key) in (str, int) for key in value) and not {TARGET, CALL, ARGS} & value.keys()
        return form if plain else _explicit(value, [[[self.form(key), item] for key, item in form.items()]])

    def _leaf(self, value: Any, hint: Any) -> Any:
        for form in _short_forms(value):
            if is_same(_read_back(form, hint), value):
                return form
        if value is None:
            return None
        if isinstance(value, tuple | set | frozenset):
            items = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
            return _explicit(value, [[self.form(item) for item in items]])
        if isinstance(value, timedelta):
            return _explicit(value, [value.days, value.seconds, value.microseconds])
        if isinstance(value, pathlib.PurePath):
            return {TARGET: f"pathlib.{type(value).__name__}", ARGS: [str(value)]}
        if type(value) in (bool, int, float, str):
            return _explicit(value, [value])
        if type(value).__module__ == "torch" and type(value).__name__ == "device":
            return {TARGET: "torch.device", ARGS: [str(value)]}
        if isinstance(value, enum.Enum):
            return {TARGET: f"{_name_of(type(value))}.{value.name}", CALL: False}
        if not hasattr(value, "__qualname__") and constant_name(value) is None:
            raise ConfigError(f"{shortened(repr(value))} cannot be written as YAML. Write recipe.json instead.")
        return {TARGET: _name_of(value), CALL: False}


class _Reader:
    """Build the tree from the result of `read`, and collect its errors."""

    def __init__(self, policy: RecipePolicy, source: str) -> None:
        self.policy = policy
        self.source = source
        self.problems: list[str] = []
        self.built: dict[int, tuple[Any, Any]] = {}

    def value(self, form: Any, path: str, hint: Any = Any, line: int = 1) -> Any:
        if not isinstance(form, dict | list):
            return self._typed(form, hint, path, line)
        if id(form) not in self.built:
            self.built[id(form)] = form, self._container(form, path, hint, line)
        return self.built[id(form)][1]

    def _container(self, form: Any, path: str, hint: Any, line: int) -> Any:
        if isinstance(form, list):
            items = [self.value(item, f"{path}[{index}]", line=line) for index, item in enumerate(form)]
            return items if _has_mappings(form) else self._typed(items, hint, path, line)
        if TARGET not in form:
            return {
                key: self.value(item, f"{path}.{key}", line=form.lines.get(key, line)) for key, item in form.items()
            }
        if ARGS in form:
            return self._call(form, path)
        for key in (PARTIAL, CALL):
            if not isinstance(form.get(key, False), bool):
                self.problems.append(
                    f"{self.source}:{form.lines[key]}: {path}: {key} takes true or false, not {form[key]!r}."
                )
        target = self._named(str(form[TARGET]), form.line)
        if target is None or form.get(CALL, True) is False:
            return target
        return self._config(target, form, path)

    def _config(self, target: Any, form: Any, path: str) -> Any:
        try:
            node = (Partial if form.get(PARTIAL) else Config)(target)
        except (TypeError, ValueError):
            self.problems.append(
                f"{self.source}:{form.line}: {path}: {form[TARGET]} takes no settings. Write `{CALL}: false` below it for "
                "the object itself."
            )
            return None
        for name, item in form.items():
            if name in (TARGET, PARTIAL, CALL):
                continue
            where, line = f"{path}.{name}".removeprefix("."), form.lines.get(name, form.line)
            try:
                value = self.value(item, where, hint_of(node, name), line)
                with recorded_at(self.source, line):
                    setattr(node, name, value)
            except (ConfigError, TypeError, AttributeError) as error:
                self.problems.append(f"{self.source}:{line}: {where}: {error}")
        return node

    def _call(self, form: Any, path: str) -> Any:
        name, arguments = str(form[TARGET]), self.value(form[ARGS], path)
        try:
            return (_VALUES[name] if name in _VALUES else _device())(*arguments)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            self.problems.append(f"{self.source}:{form.line}: {path}: {form[TARGET]}({arguments}): {error}")
            return None

    def _named(self, name: str, line: int) -> Any:
        """The class, function or constant of this name, which must be on the policy's list."""
        for module, symbols in _readings(name):
            if not self.policy.allows_import(module, symbols[0]):
                continue
            try:
                return self.policy.load(module, ".".join(symbols))
            except (ImportError, AttributeError):
                continue
            except SecurityError as error:
                raise SecurityError(f"{self.source}:{line}: {error}") from error
        self.problems.append(f"{self.source}:{line}: {name}: this class, function or constant does not exist.")
        return None

    def _typed(self, value: Any, hint: Any, path: str, line: int) -> Any:
        try:
            return _read_as(value, hint)
        except (WrongType, ConfigError) as error:
            self.problems.append(f"{self.source}:{line}: {path}: {error}")
            return value


def _device() -> Any:
    import torch

    return torch.device


def _read_as(value: Any, hint: Any) -> Any:
    converted = typed(value, hint, text=value if isinstance(value, str) else None)
    if type(converted) in (list, tuple) and isinstance(value, list):
        return type(converted)(map(_as_written, value, converted))
    converted = _as_written(value, converted)
    # If a field accepts both, text is what people mean and what recipes hold.
    return value if isinstance(converted, pathlib.PurePath) and str in typing.get_args(hint) else converted


def _as_written(value: Any, converted: Any) -> Any:
    """The converted value. A number such as ``min_lr: 0`` keeps its type."""
    return value if isinstance(value, int) and isinstance(converted, float) else converted


def _read_back(form: Any, hint: Any) -> Any:
    """The value that a reader would make of it. `NOT_SET` if the reader would reject it."""
    try:
        return _read_as(form, hint)
    except (WrongType, ConfigError):
        return NOT_SET


def _short_forms(value: Any) -> Iterator[Any]:
    """The forms that a person would write, best first."""
    if value is None or type(value) in (bool, int, float, str):
        yield value
    elif isinstance(value, timedelta):
        seconds = value.total_seconds()
        if seconds.is_integer() and seconds >= 0:
            yield next(f"{int(seconds) // size}{unit}" for unit, size in _UNITS if seconds % size == 0)
    elif isinstance(value, tuple | set | frozenset):
        yield list(value) if isinstance(value, tuple) else sorted(value, key=repr)
    elif isinstance(value, enum.Enum):
        yield value.name
    elif isinstance(value, pathlib.PurePath):
        yield str(value)
    else:
        yield format_value(value)


def _explicit(value: Any, arguments: list[Any]) -> dict[str, Any]:
    return {TARGET: _name_of(type(value)), ARGS: arguments}


def _name_of(target: Any) -> str:
    name = qualified_name(target)
    return name if "." in name else f"builtins.{name}"


def _has_mappings(items: list[Any]) -> bool:
    return any(isinstance(item, dict) or (isinstance(item, list) and _has_mappings(item)) for item in items)


def _readings(name: str) -> Iterator[tuple[str, list[str]]]:
    """The ways to divide a dotted name into a module and a name in it, longest module first, by where it is
    today."""
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        yield module_today(".".join(parts[:count]), parts[count]), parts[count:]


def _check_names(form: Any, policy: RecipePolicy) -> None:
    """Reject all names that are not on the policy's list before anything is imported."""
    seen: set[int] = set()
    pending = [form]
    while pending:
        value = pending.pop()
        if not isinstance(value, dict | list) or id(value) in seen:
            continue
        seen.add(id(value))
        pending.extend(_items(value))
        if isinstance(value, dict) and TARGET in value:
            name = str(value[TARGET])
            module, _, symbol = name.rpartition(".")
            allowed = (policy.allows_import(package, symbols[0]) for package, symbols in _readings(name))
            if not (name in _VALUES or name == "torch.device" if ARGS in value else any(allowed)):
                raise policy.refusal(module, symbol, "it is not on the list of objects that recipes may contain")


def _items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


class _Loader(yaml.SafeLoader):
    """Read scalars as in YAML 1.2, reject duplicate keys, and record lines."""

    yaml_implicit_resolvers: dict[str, Any] = {}

    def mapping(self, node: Any) -> Iterator[Mapping]:
        mapping = Mapping()
        yield mapping  # aliases of this mapping may occur inside it
        own = [self.construct_object(key) for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        if twice := [key for index, key in enumerate(own) if key in own[:index]]:
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice[0]!r} occurs twice", node.start_mark)
        self.flatten_mapping(node)
        mapping.line = node.start_mark.line + 1
        for key, value in node.value:
            name = self.construct_object(key)
            if not isinstance(name, str | int | float | bool | None):
                raise yaml.constructor.ConstructorError(None, None, "a key that is not a scalar", key.start_mark)
            mapping[name] = self.construct_object(value)
            mapping.lines[name] = key.start_mark.line + 1


class _Dumper(yaml.SafeDumper):
    """Quote text that `_Loader` would read as another type, and write short lists on one line."""

    yaml_implicit_resolvers: dict[str, Any] = {}

    def text(self, value: str) -> yaml.Node:
        style = '"' if "\x85" in value else None  # elsewhere PyYAML writes it as a line break, which readers fold
        return self.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    def sequence(self, value: list[Any]) -> yaml.Node:
        short = not any(isinstance(item, list | dict) for item in value) and len(str(value)) < 100
        return self.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=short)


_Loader.add_constructor("tag:yaml.org,2002:map", _Loader.mapping)  # pyright: ignore[reportArgumentType]
_Dumper.add_representer(list, _Dumper.sequence)
_Dumper.add_representer(str, _Dumper.text)
for _class in (_Loader, _Dumper):
    for _tag, _pattern, _first in (
        ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
        ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
        ("int", r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F]+)", list("-+0123456789")),
        (
            "float",
            r"[-+]?([0-9][0-9_]*\.[0-9_]*([eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.[0-9]+([eE][-+]?[0-9]+)?"
            r"|\.(inf|Inf|INF))|\.(nan|NaN|NAN)",
            list("-+.0123456789"),
        ),
        ("merge", r"<<", ["<"]),
    ):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)
