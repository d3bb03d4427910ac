# SPDX-License-Identifier: Apache-2.0
"""Defers the import of packages that other libraries import but few runs use, until they are used.

nemo-run imports Lepton's client, and with it fastapi, for one executor of many. torchmetrics imports transformers for
two metrics of texts and images. Together they take a fifth of a command's time. In the modules of `DEFERRED` only,
``from package import name`` returns a placeholder. The placeholder imports the package when it is called, accessed or
subclassed, and replaces itself by the real object.
"""

import builtins
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, SimpleNamespace
from typing import Any

DEFERRED = {
    "nemo_run.core.execution.lepton": "leptonai",
    "torchmetrics.functional.multimodal.clip_iqa": "transformers",
    "torchmetrics.functional.multimodal.clip_score": "transformers",
    "torchmetrics.functional.text.bert": "transformers",
    "torchmetrics.multimodal.clip_iqa": "transformers",
    "torchmetrics.multimodal.clip_score": "transformers",
    "torchmetrics.text.bert": "transformers",
}
"""Modules of other libraries, and the package that each does without until it is used."""


def install() -> None:
    """Have the modules of `DEFERRED` that are imported from now on wait with their package. Idempotent."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class StandIn:
    """A class or function of a package that isn't imported yet."""

    def __init__(self, module: str, name: str, holder: dict[str, Any]):
        self.__dict__.update(_module=module, _name=name, _holder=holder)

    def _load(self) -> Any:
        real = getattr(import_module(self._module), self._name)
        for name, value in list(self._holder.items()):
            if value is self:
                self._holder[name] = real
        return real

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # `typing` asks annotations for such names
        return getattr(self._load(), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._load()(*args, **kwargs)

    def __getitem__(self, item: Any) -> Any:
        return self._load()[item]

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, self._load())

    def __subclasscheck__(self, subclass: type) -> bool:
        return issubclass(subclass, self._load())

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._load(),)

    def __repr__(self) -> str:
        return f"<{self._module}.{self._name}, not imported yet>"


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        package = DEFERRED.get(fullname)
        if package is None or package in sys.modules:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Waiting(spec, spec.loader, package)
        return spec


class _Waiting(Loader):
    """Run a module's code with a special ``import``, of which only placeholders remain afterwards."""

    def __init__(self, spec: ModuleSpec, real: Loader, package: str):
        self.spec, self.real, self.package = spec, real, package

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        running = True

        def importing(name: str, holder: Any = None, local: Any = None, names: Any = (), level: int = 0) -> Any:
            if not running or level or name.partition(".")[0] != self.package or not names:
                return real_import(name, holder, local, names, level)
            return SimpleNamespace(**{one: StandIn(name, one, holder) for one in names})

        real_import: Callable[..., Any] = builtins.__import__
        self.spec.loader = module.__loader__ = self.real
        vars(module)["__builtins__"] = vars(builtins) | {"__import__": importing}
        try:
            self.real.exec_module(module)
        finally:
            running = False
