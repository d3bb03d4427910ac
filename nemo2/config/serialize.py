# SPDX-License-Identifier: Apache-2.0
"""A recipe as JSON that can be read back without trusting it, and as YAML for people.

Reading a recipe is a place where a file decides what gets called. So names are looked up in an allow-list before
anything is imported, a name is taken only if it is what it says it is (a class under its own module, not something that
an allowed module happens to have imported), and what a config calls must be a class made for configs or an entry point
that says so with `@configurable`. nemo-run's own transport between a launcher and its workers doesn't pass through
here: there both ends are the user's.
"""

import dataclasses
import inspect
import json
from collections.abc import Iterable, Iterator
from typing import Any

import yaml
from fiddle._src.experimental import serialization

from nemo2.config import wire
from nemo2.config.capture import is_configurable
from nemo2.config.checks import check_serialisable
from nemo2.config.show import plain
from nemo2.config.walk import iterate_nodes
from nemo2.errors import ConfigError, SecurityError

DEFAULT_ALLOWED = (
    "nemo2",
    "megatron.core",
    "lightning.pytorch.callbacks",
    "lightning.pytorch.loggers",
    "torch.nn.functional",
    "torch.nn.modules.activation",
)
"""Module prefixes whose names a recipe may hold; `callable_rule` says which of them a config may call."""

_STRUCTURE = {
    "builtins": {"dict", "list", "tuple", "set", "frozenset", "bytes", "slice", "int", "float", "str", "bool"},
    "fiddle._src.config": {"BuildableTraverserMetadata", "Config", "NoValue"},
    "fiddle._src.partial": {"Partial", "ArgFactory"},
    "nemo_run.config": {"Config", "Partial"},
    "nemo2.config.tree": {"Config", "Partial"},
}
"""What recipes themselves are made of. A config may call none of these but `dict`."""

_PATHS = {"Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath"}
_VALUES = {"pathlib": _PATHS, "pathlib._local": _PATHS, "datetime": {"timedelta"}, "torch": {"device"}}
"""Plain values that are written as an object of their type, and that a config may also call."""
_METADATA = {"type": "pyref", "module": "fiddle._src.config", "name": "BuildableTraverserMetadata"}


def to_json(recipe: Any, *, indent: int | None = None) -> str:
    """The recipe as JSON: everything but its history, with configs that are shared still shared.

    Raises:
        ConfigError: a value has no textual form; all such values are named.
    """
    check_serialisable(recipe)
    return serialization.dump_json(recipe, indent=indent)


def from_json(text: str | bytes, allowed_modules: Iterable[str] = ()) -> Any:
    """The recipe that `to_json` wrote, as an independent tree without history. Nothing is built or called.

    Args:
        text: What `to_json` returned, from wherever; it isn't trusted.
        allowed_modules: Module prefixes (`"my_project"`) or single names (`"my_project.models:MyModel"`) to allow
            besides `DEFAULT_ALLOWED`. Whatever they name is taken as made for recipes.

    Raises:
        SecurityError: it names something that isn't allowed; nothing was imported for it.
        ConfigError: it is not a recipe in JSON.
    """
    policy = RecipePolicy(allowed_modules)
    try:
        tree = json.loads(text)
        for reference in _references(tree):
            policy.check_name(reference["module"], reference["name"])
        recipe = serialization.Deserialization(tree, policy).result
    except serialization.PyrefPolicyError as error:
        raise SecurityError(
            f"This recipe names {error.module}.{error.symbol}, which is not a class, function or constant of that "
            "module itself: refused."
        ) from error
    except SecurityError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, ImportError, RecursionError) as error:
        raise ConfigError(f"This is not a recipe in JSON, or one of another version: {_first_line(error)}") from error
    except serialization.DeserializationError as error:
        raise ConfigError(f"This is not a recipe in JSON: {_first_line(error)}") from error
    policy.check_callables(recipe)
    return recipe


def to_yaml(recipe: Any, *, defaults: bool = False) -> str:
    """The recipe as YAML to read, with `_target_` for the class of each config; `defaults` adds what nobody set."""
    return yaml.safe_dump(plain(recipe, defaults=defaults), sort_keys=False, allow_unicode=True, width=120)


class RecipePolicy(serialization.PyrefPolicy):
    """Which names a recipe may hold, and which of them its configs may call."""

    def __init__(self, allowed_modules: Iterable[str] = ()) -> None:
        self.trusted = tuple(allowed_modules)

    def allows_import(self, module: str, symbol: str) -> bool:
        if symbol in _STRUCTURE.get(module, ()) or symbol in _VALUES.get(module, ()):
            return True
        if module == "torch":  # dtypes and built-in activations, whose kind is checked once they are there
            return symbol.isidentifier() and not symbol.startswith("_")
        return _covers((*DEFAULT_ALLOWED, *self.trusted), module, symbol)

    def allows_value(self, value: Any) -> bool:
        # Only things that are what they are called: a class or function found in its own module, or a constant that
        # fiddle itself would write by this name. A module's imports (`os.system` of an allowed module) are neither.
        if wire.constant_name(value) is not None:
            return True
        if isinstance(value, type) and (value.__module__ in _STRUCTURE or _is_value_type(value)):
            return True
        module = inspect.getmodule(value)
        name = getattr(value, "__qualname__", type(value).__qualname__)
        return module is not None and self.allows_import(module.__name__, name) and module.__name__ != "torch"

    def check_name(self, module: Any, symbol: Any) -> None:
        """Raise SecurityError for a name that isn't on the list. Imports nothing."""
        if not isinstance(module, str) or not isinstance(symbol, str) or not self.allows_import(module, symbol):
            raise self.refusal(module, symbol, "it is not on the list of modules that recipes may use")

    def check_callables(self, recipe: Any) -> None:
        """Raise SecurityError where building the recipe would call something that isn't made for recipes."""
        for path, node in iterate_nodes(recipe):
            target = node.__fn_or_cls__
            if not self.may_be_called(target):
                module, name = getattr(target, "__module__", "?"), getattr(target, "__qualname__", repr(target))
                raise self.refusal(module, name, f"{path or 'the recipe'} would call it, and it isn't made for that")

    def may_be_called(self, target: Any) -> bool:
        """Config classes and entry points: not every class of an allowed package, and no plain functions."""
        module, name = getattr(target, "__module__", None) or "", getattr(target, "__qualname__", "")
        if _covers(self.trusted, module, name) or target is dict or _is_value_type(target):
            return True
        if isinstance(target, type) and dataclasses.is_dataclass(target):
            return _covers(("nemo2", "megatron.core"), module, name)
        if is_configurable(target):
            return _covers(("nemo2",), module, name)
        if not isinstance(target, type):
            return module == "torch.nn.functional"
        bases = {f"{base.__module__}.{base.__qualname__}" for base in target.__mro__}
        return bool(bases & _BUILDABLE_BASES)

    def refusal(self, module: Any, symbol: Any, reason: str) -> SecurityError:
        """The error for one refused name."""
        return SecurityError(
            f"This recipe names {module}.{symbol}, and {reason}: refused. Where you know that name and trust the file, "
            f"allow it with from_json(text, allowed_modules=[{f'{module}:{symbol}'!r}])."
        )

    def __str__(self) -> str:
        return "nemo2's recipe policy"


_BUILDABLE_BASES = {
    "lightning.pytorch.callbacks.callback.Callback",
    "lightning.pytorch.loggers.logger.Logger",
    "torch.nn.modules.module.Module",
}


def _is_value_type(target: Any) -> bool:
    return getattr(target, "__qualname__", None) in _VALUES.get(getattr(target, "__module__", None) or "", ())


def _covers(allowed: Iterable[str], module: str, symbol: str) -> bool:
    """Whether one of the prefixes or `module:symbol` names covers a symbol."""
    for entry in allowed:
        prefix, _, only = entry.partition(":")
        if only:
            if module == prefix and symbol == only:
                return True
        elif module == prefix or module.startswith(f"{prefix}."):
            return True
    return False


def _references(tree: Any) -> Iterator[dict[str, Any]]:
    """Every reference to a Python name in fiddle's JSON, wherever it hides, and no structure that could call one."""
    pending = [tree]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            pending.extend(value.values())
            kind = value.get("type")
            if kind == "pyref":
                if not {"module", "name"} <= value.keys():
                    raise ConfigError("This is not a recipe in JSON: a reference without module and name.")
                yield value
            elif isinstance(kind, dict):
                _check_structure(kind, value.get("metadata"))
        elif isinstance(value, list):
            pending.extend(value)


def _check_structure(kind: dict[str, Any], metadata: Any) -> None:
    """Refuse objects that aren't part of a recipe's structure, and metadata that names something else to call.

    fiddle rebuilds a named tuple by calling whatever its metadata names, which here must be the tuple's own class.
    """
    module, name = kind.get("module"), kind.get("name")
    is_structure = isinstance(module, str) and name in _STRUCTURE.get(module, set()) | _VALUES.get(module, set())
    if not is_structure or (kind == _METADATA and metadata != _METADATA):
        raise SecurityError(
            f"This recipe holds an object of {module}.{name}, which recipes aren't made of: refused before it was "
            "imported. Recipes hold configs, plain data and references to names."
        )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
