# SPDX-License-Identifier: Apache-2.0
"""Finds recipes by name: the modules of this package, and the user's own."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo2.base.errors import ConfigError
from nemo2.base.names import did_you_mean
from nemo2.recipes._shipped import names

if TYPE_CHECKING:
    import nemo2.recipes._typed as _typed
    from nemo2.recipes._own import Source


def own() -> "tuple[dict[str, Source], list[str]]":
    """The user's own recipes by name, not yet imported, and a line for each that can't be reached.

    They come from ``$NEMO2_RECIPES`` and from installed packages' entry points (`nemo2.recipes._own`).
    """
    from nemo2.recipes._own import sources

    return sources()


def get(name: str) -> "_typed.AnyRecipe":
    """Return a recipe by name, or by the path of a file, with ``RECIPE`` (its facts), ``model``, ``trainer`` and
    ``pretrain_recipe``.

    Raises:
        ConfigError: there is no such recipe (the message lists the nearest names), or the user's own recipe can't be
            imported.
    """
    return _found(name)


def _found(name: str) -> Any:
    """The module, or an `OwnRecipe`."""
    shipped = names()
    if name in shipped:
        return import_module(f"nemo2.recipes.{name}")
    from nemo2.recipes import _own

    if _own.is_path(name):
        return _own.load_path(name)
    own, _ = _own.sources()
    if name not in own:
        file = Path(f"{name}.py")
        here = f" There is a file {file} in this folder. To use it, write ./{file}." if file.is_file() else ""
        hint = did_you_mean(name, [*shipped, *own])
        raise ConfigError(f"There is no recipe {name!r}{hint} Run `nemo2 list` for all names.{here}")
    return own[name].load()
