# SPDX-License-Identifier: Apache-2.0
"""The recipes: one module of facts each, loaded when it is asked for.

A file here is a recipe (``llama3_8b.py``); a folder holds the factories that recipes share, under NeMo 2.0's paths
(``precision.mixed_precision``, ``optim.adam``, ``log.default``). Listing reads facts and imports neither torch nor
nemo-run.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from nemo2.lazy import lazy_names

if __name__ != "nemo2.recipes":
    raise ImportError("This folder is installed as `nemo2.recipes`: write `from nemo2.recipes import llama3_8b`.")

if TYPE_CHECKING:
    from types import ModuleType

_RECIPES = sorted(file.stem for file in Path(__file__).parent.glob("*.py") if not file.stem.startswith("_"))


def names() -> list[str]:
    """Every recipe by name, sorted."""
    return list(_RECIPES)


def get(name: str) -> "ModuleType":
    """The module of a recipe: ``RECIPE`` (its facts), ``model``, ``trainer``, ``pretrain_recipe``.

    Raises:
        ConfigError: there is no such recipe; the nearest names are given.
    """
    if name not in _RECIPES:
        from nemo2.errors import ConfigError
        from nemo2.names import did_you_mean

        raise ConfigError(f"There is no recipe {name!r}{did_you_mean(name, _RECIPES)} See `nemo2 list`.")
    return _lookup(name)


__all__ = ["get", "names", *_RECIPES]  # pyright: ignore[reportUnsupportedDunderAll]
_lookup, __dir__ = lazy_names(__name__, {name: f"{__name__}.{name}" for name in _RECIPES})
__getattr__ = _lookup
