# SPDX-License-Identifier: Apache-2.0
"""Reads a recipe's JSON from untrusted sources. `nemo2.config.policy` lists what a file may name and call."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fiddle._src.experimental import serialization

from nemo2.base.errors import ConfigError, SecurityError
from nemo2.base.files import parse_json
from nemo2.config.moved_names import module_today
from nemo2.config.policy import MOST_VALUES, STRUCTURE, VALUES, RecipePolicy, has_at_most

_METADATA = {"type": "pyref", "module": "fiddle._src.config", "name": "BuildableTraverserMetadata"}


def from_json(text: str | bytes, allowed_modules: Iterable[str] = ()) -> Any:
    """Read a recipe that `nemo2.config.to_json` wrote, as an independent tree without history. Builds and calls nothing.

    Args:
        text: The JSON, from any source. It isn't trusted.
        allowed_modules: Module prefixes (`"my_project"`) or single names (`"my_project.models:MyModel"`) to allow
            besides `nemo2.config.policy.DEFAULT_ALLOWED`. All their names count as made for recipes.

    Raises:
        SecurityError: the file names something that isn't allowed. Nothing was imported for it.
        ConfigError: the text is not a recipe in JSON.
    """
    policy = RecipePolicy(allowed_modules)
    try:
        tree = parse_json(text)
        for reference in _references(tree):
            reference["module"] = module_today(reference["module"], reference["name"])
            policy.check_name(reference["module"], reference["name"])
        if not has_at_most_values(tree.get("root"), tree.get("objects", {}), most=MOST_VALUES):
            raise ConfigError(
                f"This is not a recipe in JSON: its objects contain each other and add up to more than {MOST_VALUES} "
                "values."
            )
        recipe = serialization.Deserialization(tree, policy).result
        policy.check(recipe)
    except serialization.PyrefPolicyError as error:
        raise SecurityError(
            f"This recipe names {error.module}.{error.symbol}, but that module does not itself define a class, "
            "function or constant of this name. nemo2 does not load it."
        ) from error
    except SecurityError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, ImportError, RecursionError) as error:
        raise ConfigError(
            f"This is not a recipe in JSON, or a recipe of another version: {_first_line(error)}"
        ) from error
    except serialization.DeserializationError as error:
        raise ConfigError(f"This is not a recipe in JSON: {_first_line(error)}") from error
    return recipe


def _references(tree: Any) -> Iterator[dict[str, Any]]:
    """Every reference to a Python name in fiddle's JSON, wherever it occurs, and every structure that could call a
    name."""
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
    """Reject objects that aren't part of a recipe's structure, and metadata that names something else to call.

    fiddle rebuilds a named tuple by calling the class in its metadata, which must be the tuple's own class.
    """
    module, name = kind.get("module"), kind.get("name")
    is_structure = isinstance(module, str) and name in STRUCTURE.get(module, set()) | VALUES.get(module, set())
    if not is_structure or (kind == _METADATA and metadata != _METADATA):
        raise SecurityError(
            f"This recipe contains an object of {module}.{name}, which recipes cannot contain. nemo2 rejected it "
            "before importing it. Recipes contain configs, plain data and references to names."
        )


def has_at_most_values(root: Any, objects: Mapping[str, Any], *, most: int) -> bool:
    """Whether fiddle's JSON has at most this many values, a shared object counted at each of its places.

    Args:
        objects: The objects that the JSON's references name, by key.
    """

    def items(value: Any) -> Iterable[Any]:
        if isinstance(value, dict) and value.get("type") == "ref":
            return (objects.get(str(value.get("key"))),)
        return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()

    return has_at_most(most, root, items)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
