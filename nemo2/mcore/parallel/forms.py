# SPDX-License-Identifier: Apache-2.0
"""The forms in which users write the parts of a step: with the model as an argument, or without.

NeMo's documents use ``forward_step(self, model, batch)`` and ``loss_reduction(self, model)``. NeMo's own models use
``forward_step(self, batch)`` and ``training_loss_reduction(self)``. The number of a function's arguments distinguishes
the forms.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl

_WITHOUT_MODEL = {"forward_step": 1, "data_step": 1, "loss_reduction": 0}


def with_model(function: Callable[..., Any], module: Any) -> Callable[..., Any]:
    """``function`` as a function without the model argument.

    A ``forward_step`` or ``data_step`` with two positional arguments, and a reduction's function with one, takes the
    model first. The model is ``module``, or the module that it wraps if it can't be called itself.
    """
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind in kinds and parameter.default is parameter.empty
    ]
    name = getattr(function, "__name__", "")
    usual = next((count for end, count in _WITHOUT_MODEL.items() if name.endswith(end)), 1)
    if len(required) <= usual:
        return function
    callable_itself = type(module).forward is not pl.LightningModule.forward
    return partial(function, module if callable_itself else getattr(module, "module", module))


def reduction_of(module: Any, stage: str) -> Any:
    """The loss reduction of a module for ``stage``: its ``<stage>_loss_reduction`` or its ``loss_reduction``. None: it
    has none.

    If one of them is inherited, the subclass's definition wins. Predictions are collected, and reduced only if the
    module defines a reduction for this stage.
    """
    names = [f"{stage}_loss_reduction", *(["loss_reduction"] if stage != "predict" else [])]
    for name in sorted(names, key=lambda name: _depth(module, name)):
        reduction = getattr(module, name, None)
        if reduction is not None:
            return _called(reduction, module) if inspect.ismethod(reduction) else reduction
    return None


def _called(method: Any, module: Any) -> Any:
    """The result of a reduction's method. In ``validation_loss_reduction(self, model)``, the name
    ``model.validation_loss_reduction`` stands for the reduction that the method overrides."""
    call, name = with_model(method, module), method.__name__
    if call is method:
        return call()
    inherited = [
        base.__dict__[name] for base in type(module).__mro__[_depth(module, name) + 1 :] if name in base.__dict__
    ]
    if not inherited:
        return call()
    overridden = inherited[0].__get__(module, type(module))
    overridden = with_model(overridden, module)() if inspect.ismethod(overridden) else overridden
    module.__dict__[name] = overridden  # in front of the class's method, also where a cached property has stored it
    try:
        return call()
    finally:
        del module.__dict__[name]


def _depth(module: Any, name: str) -> int:
    """The depth in the class hierarchy at which a module's attribute is defined. The module's own class comes first."""
    if name in module.__dict__:
        return -1
    bases = type(module).__mro__
    return next((depth for depth, base in enumerate(bases) if name in base.__dict__), len(bases))
