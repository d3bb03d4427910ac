# SPDX-License-Identifier: Apache-2.0
"""The recipes: one module of facts each, loaded when it is asked for.

A file here is a recipe (``llama3_8b.py``); a folder holds the factories that recipes share, under NeMo 2.0's paths
(``precision.mixed_precision``, ``optim.adam``, ``log.default``). Listing reads facts and imports neither torch nor
nemo-run. Recipes of a user's own, in files and packages outside, are found by name or path too.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from nemo2.lazy import lazy_names

if __name__ != "nemo2.recipes":
    raise ImportError("This folder is installed as `nemo2.recipes`: write `from nemo2.recipes import llama3_8b`.")

if TYPE_CHECKING:
    from types import ModuleType

    from nemo2.parallel.layout import Layout as Layout
    from nemo2.recipes._assembler import PretrainRecipe as PretrainRecipe
    from nemo2.recipes._own import OwnRecipe, Source

_RECIPES = sorted(file.stem for file in Path(__file__).parent.glob("*.py") if not file.stem.startswith("_"))


def names() -> list[str]:
    """Every recipe of this package by name, sorted."""
    return list(_RECIPES)


def own() -> "tuple[dict[str, Source], list[str]]":
    """The user's own recipes by name, not yet imported, and a line for each that is out of reach.

    They come from ``$NEMO2_RECIPES`` and from installed packages' entry points (`nemo2.recipes._own`).
    """
    from nemo2.recipes._own import sources

    return sources()


def get(name: str) -> "ModuleType | OwnRecipe":
    """A recipe by name, or by the path of a file: ``RECIPE`` (its facts), ``model``, ``trainer``, ``pretrain_recipe``.

    Raises:
        ConfigError: there is no such recipe (the nearest names are given), or the user's own can't be imported.
    """
    if name in _RECIPES:
        return _lookup(name)
    from nemo2.recipes import _own

    if _own.is_path(name):
        return _own.load_path(name)
    found, _ = _own.sources()
    if name not in found:
        from nemo2.errors import ConfigError
        from nemo2.names import did_you_mean

        file = Path(f"{name}.py")
        here = f" There is a file {file} here: write ./{file} for it." if file.is_file() else ""
        hint = did_you_mean(name, [*_RECIPES, *found])
        raise ConfigError(f"There is no recipe {name!r}{hint} See `nemo2 list`.{here}")
    return found[name].load()


_PUBLIC = {"Layout": "nemo2.parallel.layout", "PretrainRecipe": "nemo2.recipes._assembler"}
__all__ = ["get", "names", "own", *_PUBLIC, *_RECIPES]  # pyright: ignore[reportUnsupportedDunderAll]
_lookup, __dir__ = lazy_names(__name__, {**_PUBLIC, **{name: f"{__name__}.{name}" for name in _RECIPES}})
__getattr__ = _lookup
