# SPDX-License-Identifier: Apache-2.0
"""Packages whose names are imported on first use, so that a front door costs nothing to open.

A package's stub, ``__init__.pyi``, is the one list of its names: type checkers and editors read it, and so does
``__getattr__, __dir__, __all__ = front_door(__name__, __file__)`` in its ``__init__.py``.
"""

import ast
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any


class UnknownAttribute(AttributeError):
    """A package has no such name. The nearest ones are found when the error is printed: most are caught by ``hasattr``."""

    known: Iterable[str] = ()

    def __str__(self) -> str:
        from nemo2.base.names import did_you_mean

        package, name = self.args
        return f"{package} has no name {name!r}{did_you_mean(name, self.known)}"


def front_door(
    package: str, file: str, modules: Iterable[str] = (), fallback: str = ""
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of a package, from the stub beside its ``__init__.py``, ``file``.

    ``modules`` are modules of the package that count among its names, whether its stub has them or not. A resolved name
    is stored in the package, so that it is looked up once per process. An unknown name is an AttributeError with the
    nearest known names.

    ``fallback`` is a function, as ``module:function``, that is called with a name that neither the stub nor a file of the
    package has, and answers None where it doesn't know it either. Its names aren't listed, and it isn't imported before.
    """
    homes = {**stub_homes(Path(file).with_suffix(".pyi").read_text()), **dict.fromkeys(modules, package)}

    def find(name: str) -> Any:
        home = homes.get(name)
        if home is None and not name.startswith("_") and Path(file).with_name(f"{name}.py").exists():
            home = package
        if home is None and fallback and (value := resolve_name(fallback)(name)) is not None:
            return value
        if home is None:
            error = UnknownAttribute(package, name)
            error.known = homes
            raise error
        value = import_module(f"{package}.{name}") if home == package else _from(home, name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return find, names, sorted(homes)


def stub_homes(stub: str) -> dict[str, str]:
    """The module that each name of a stub is imported from. ``import *`` brings what that package's ``__all__`` says."""
    homes = {}
    for node in ast.parse(stub).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [alias.name for alias in node.names]
            names = import_module(node.module).__all__ if names == ["*"] else names
            homes.update(dict.fromkeys(names, node.module))
    return homes


def _from(home: str, name: str) -> Any:
    """``from home import name``: an attribute, or a module of the package ``home``."""
    module = import_module(home)
    return getattr(module, name) if hasattr(module, name) else import_module(f"{home}.{name}")
