# SPDX-License-Identifier: Apache-2.0
"""A recipe as JSON that can be read back without trusting it.

What a file may name, and what of it may be called, is `nemo2.config.policy`. nemo-run's own transport between a launcher and
its workers doesn't pass through here: there both ends are the user's.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from fiddle._src.experimental import serialization

from nemo2.config.checks import check_serialisable
from nemo2.config.policy import STRUCTURE, VALUES, RecipePolicy
from nemo2.errors import ConfigError, SecurityError
from nemo2.files import parse_json

_METADATA = {"type": "pyref", "module": "fiddle._src.config", "name": "BuildableTraverserMetadata"}
_MOST_VALUES = 10_000_000
"""With everything that is shared counted as often as it is met; a large recipe has some thousands."""


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
            besides `nemo2.config.policy.DEFAULT_ALLOWED`. Whatever they name is taken as made for recipes.

    Raises:
        SecurityError: it names something that isn't allowed; nothing was imported for it.
        ConfigError: it is not a recipe in JSON.
    """
    policy = RecipePolicy(allowed_modules)
    try:
        tree = parse_json(text)
        for reference in _references(tree):
            policy.check_name(reference["module"], reference["name"])
        _refuse_bombs(tree)
        recipe = serialization.Deserialization(tree, policy).result
        policy.check(recipe)
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
    return recipe


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
    is_structure = isinstance(module, str) and name in STRUCTURE.get(module, set()) | VALUES.get(module, set())
    if not is_structure or (kind == _METADATA and metadata != _METADATA):
        raise SecurityError(
            f"This recipe holds an object of {module}.{name}, which recipes aren't made of: refused before it was "
            "imported. Recipes hold configs, plain data and references to names."
        )


def _refuse_bombs(tree: Any) -> None:
    """Refuse objects that hold each other so often that what walks the recipe would never come to an end."""
    objects = tree.get("objects") if isinstance(tree, dict) else None
    if not isinstance(objects, dict):
        return
    sizes: dict[str, int] = {}

    def size(value: Any) -> int:
        if isinstance(value, list):
            return 1 + sum(map(size, value))
        if not isinstance(value, dict):
            return 1
        if value.get("type") != "ref":
            return 1 + sum(map(size, value.values()))
        key = str(value.get("key"))
        if key not in sizes:
            sizes[key] = _MOST_VALUES  # as long as it isn't known: what holds itself is too large
            sizes[key] = size(objects.get(key))
        return sizes[key]

    if size(tree.get("root")) >= _MOST_VALUES:
        raise ConfigError(
            f"This is not a recipe in JSON: its objects hold each other and come to more than {_MOST_VALUES} values in all."
        )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
