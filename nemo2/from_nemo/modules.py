# SPDX-License-Identifier: Apache-2.0
"""NeMo 2.0's module paths as attributes: ``nl.pytorch.callbacks.PEFT``, ``llm.gpt.data.mock``.

A path that `nemo2.from_nemo.names` knows is a module here, and the names in it are nemo2's.
"""

from importlib import import_module
from types import ModuleType
from typing import Any, Optional

from nemo2.base.names import did_you_mean
from nemo2.from_nemo.names import MODULES, PACKAGES, find, module_of


def nemo_module(path: str) -> Optional[ModuleType]:
    """The names of NeMo's module or package ``path``. None: nemo2 knows no such path."""
    is_module = module_of(path) is not None or any(one.startswith(f"{path}.") for one in (*MODULES, *PACKAGES))
    return _NemoModule(path) if is_module else None


# What the front doors ask for a name that they don't have: NeMo's module of that name.
def in_lightning(name: str) -> Optional[ModuleType]:
    return nemo_module(f"nemo.lightning.{name}")


def in_llm(name: str) -> Optional[ModuleType]:
    return nemo_module(f"nemo.collections.llm.{name}")


def in_recipes(name: str) -> Optional[ModuleType]:
    return nemo_module(f"nemo.collections.llm.recipes.{name}")


class _NemoModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        home = module_of(self.__name__)
        own = import_module(home) if home is not None else None
        if (inner := nemo_module(f"{self.__name__}.{name}")) is not None:  # first: llm.mock is a function too
            return inner
        if hasattr(own, name):
            return getattr(own, name)
        counterpart = find(name)
        if counterpart.status in ("works", "renamed"):
            module = import_module(counterpart.home)
            return getattr(module, counterpart.name) if counterpart.name else module
        gone = counterpart.status == "gone"
        reason = counterpart.reason if gone else f"no such name{did_you_mean(name, self.__dir__())}"
        raise AttributeError(f"{self.__name__}.{name}: {reason}")

    def __dir__(self) -> list[str]:
        home = module_of(self.__name__)
        below = f"{self.__name__}."
        inner = {one.removeprefix(below).split(".")[0] for one in (*MODULES, *PACKAGES) if one.startswith(below)}
        return sorted({*inner, *(vars(import_module(home)) if home is not None else ())})
