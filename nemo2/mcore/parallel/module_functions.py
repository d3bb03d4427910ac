# SPDX-License-Identifier: Apache-2.0
"""Functions over the modules of a model by NeMo 2.0's names (``llm.fn``): `map`, `walk`, `forall`, and `FNMixin` for
models.

They are for scripts that change a module themselves. To train a changed model under its own parameter names and on any
layout, use `nemo2.mcore.parallel.transform`.
"""

import inspect
from collections.abc import Callable
from typing import Any, Self, TypeVar

from torch import nn

from nemo2.base.errors import ConfigError

_Module = TypeVar("_Module", bound=nn.Module)


def map(module: _Module, func: Callable[..., Any], leaf_only: bool = False, **kwargs: Any) -> _Module:
    """Apply ``func`` to ``module`` and its direct children, and return the resulting module.

    A replacement may contain its argument. Then the children of the argument follow, and the other modules of the
    replacement are left as they are.

    Args:
        module: The module.
        func: A function that returns the replacement of its argument. It receives those of the keywords ``i`` (index
            among its siblings), ``name``, ``prefix`` (dotted path of the parent) and ``kwargs`` that it accepts.
        leaf_only: Call ``func`` only for modules that have parameters of their own.

    Raises:
        ConfigError: ``func`` did not return a module.
    """
    return _mapped(module, func, leaf_only, depth=1, kwargs=kwargs, seen={})


def walk(module: _Module, func: Callable[..., Any], leaf_only: bool = False, **kwargs: Any) -> _Module:
    """Apply `map` to all modules below: first to a parent, then to the children of its replacement. A module in two
    places is visited once.

    The arguments are those of `map`.
    """
    return _mapped(module, func, leaf_only, depth=None, kwargs=kwargs, seen={})


def forall(module: nn.Module, func: Callable[[nn.Module], Any], recurse: bool = False) -> bool:
    """Whether ``func`` is true for a module.

    Args:
        module: The module.
        func: A function that receives a module.
        recurse: Ask for each module below it too.
    """
    return all(bool(func(one)) for one in (module.modules() if recurse else [module]))


class FNMixin:
    """Methods of a model for these functions over the whole model."""

    def map(self, func: Callable[..., Any], leaf_only: bool = False) -> Self:
        return map(self, func, leaf_only=leaf_only)  # pyright: ignore[reportArgumentType, reportReturnType]

    def walk(self, func: Callable[..., Any], leaf_only: bool = False) -> Self:
        return walk(self, func, leaf_only=leaf_only)  # pyright: ignore[reportArgumentType, reportReturnType]

    def forall(self, func: Callable[[nn.Module], Any], recurse: bool = False) -> bool:
        return forall(self, func, recurse=recurse)  # pyright: ignore[reportArgumentType]

    def freeze(self) -> None:
        """Freeze all parameters. Call this before the model is wrapped for training, because gradient buffers can't
        skip parameters later."""
        self.requires_grad_(False)  # pyright: ignore[reportAttributeAccessIssue]

    def unfreeze(self) -> None:
        self.requires_grad_(True)  # pyright: ignore[reportAttributeAccessIssue]


def _mapped(
    module: Any, func: Callable[..., Any], leaf_only: bool, *, depth: Any, kwargs: dict[str, Any], seen: dict[int, Any]
) -> Any:
    if id(module) in seen:
        return seen[id(module)]
    result = module
    if not leaf_only or list(module.parameters(recurse=False)):
        result = func(module, **_accepted(func, kwargs))
        if not isinstance(result, nn.Module):
            raise ConfigError(
                f"{_called(func)} returned {type(result).__name__}. It must return a module: its argument or a "
                "replacement."
            )
    seen[id(module)] = seen[id(result)] = result
    if depth == 0:
        return result
    # The module inside its wrapper must not be wrapped again.
    parent = module if result is not module and any(one is module for one in result.modules()) else result
    path = ".".join(filter(None, [kwargs.get("prefix"), kwargs.get("name")]))
    others = {key: value for key, value in kwargs.items() if key not in ("i", "name", "prefix")}
    for i, (name, child) in enumerate(list(parent._modules.items())):
        if child is not None:
            inside = others | {"i": i, "name": name, "prefix": path}
            parent._modules[name] = _mapped(
                child, func, leaf_only, depth=None if depth is None else depth - 1, kwargs=inside, seen=seen
            )
    return result


def _accepted(func: Callable[..., Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(func).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return kwargs
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in kwargs.items() if name in names}


def _called(func: Callable[..., Any]) -> str:
    return getattr(func, "__qualname__", type(func).__name__)
