# SPDX-License-Identifier: Apache-2.0
"""Packages whose names are imported on first use, so that a front door costs nothing to open.

``__getattr__, __dir__ = lazy_names(__name__, {"Trainer": "nemo2.trainer"})`` in an ``__init__.py`` is all a package
needs; imports under ``TYPE_CHECKING`` tell type checkers and editors the same.
"""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` for a package, by the module each name lives in.

    A name that is the last part of its home (``"lr_scheduler": "nemo2.optim.lr_scheduler"``) is that module itself.
    What was found once is kept in the package, so each name is looked up once per process. An unknown name is an
    AttributeError with the nearest known ones.
    """

    def find(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            from nemo2.names import did_you_mean

            raise AttributeError(f"{package} has no name {name!r}{did_you_mean(name, homes)}")
        module = import_module(home)
        value = module if home.rpartition(".")[2] == name and not hasattr(module, name) else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return find, names
