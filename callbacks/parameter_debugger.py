# SPDX-License-Identifier: Apache-2.0
"""Logs a table of every parameter and its gradient at chosen hooks."""

import logging
from collections.abc import Callable
from typing import Any, Optional, Union

import lightning.pytorch as pl
from torch import Tensor

from nemo2.base.columns import columns
from nemo2.base.errors import ConfigError
from nemo2.base.names import did_you_mean
from nemo2.config.capture import configurable
from nemo2.mcore.parallel.inspection import owned_gradients

logger = logging.getLogger(__name__)


def collect_precision(tensor: Tensor) -> dict[str, str]:
    return {"Precision": str(tensor.dtype)}


def collect_precision_and_shape(tensor: Tensor) -> dict[str, str]:
    return {"Shape": str(tuple(tensor.shape)), "Precision": str(tensor.dtype)}


_HOOKS = sorted(
    name
    for name in vars(pl.Callback)
    if name.startswith(("on_", "teardown")) and not name.endswith(("_fit_start", "state_dict"))
)
"""The hooks at which a model exists."""


@configurable
class ParameterDebugger(pl.Callback):
    """Call functions with each parameter and its gradient at hooks of Lightning, and log their results as a table.

    A function must not change the tensor, and may raise an error. Each rank logs its part of the model under the names
    in the whole model. The gradient comes from this rank's buffers; with the distributed optimizer only this rank's
    part of it is reduced.

    Args:
        param_fn: ``(parameter) -> {column: text}``. None: skip parameters.
        grad_fn: ``(gradient) -> {column: text}``, called for parameters with a gradient, which has the parameter's
            shape. None: skip gradients.
        log_on_hooks: The names of one or several hooks of Lightning's callbacks.

    Raises:
        ConfigError: an unknown hook, a hook that runs before the model exists, or a function that can't be called.
    """

    def __init__(
        self,
        param_fn: Optional[Callable[[Tensor], Optional[dict[str, str]]]] = collect_precision_and_shape,
        grad_fn: Optional[Callable[[Tensor], Optional[dict[str, str]]]] = collect_precision,
        log_on_hooks: Union[list[str], str] = "on_train_start",
    ) -> None:
        for name, function in (("param_fn", param_fn), ("grad_fn", grad_fn)):
            if function is not None and not callable(function):
                raise ConfigError(f"ParameterDebugger.{name}={function!r}: must be a function of a tensor, or None.")
        self.param_fn = param_fn
        self.grad_fn = grad_fn
        self.log_on_hooks = log_on_hooks
        for name in [log_on_hooks] if isinstance(log_on_hooks, str) else log_on_hooks:
            if name not in _HOOKS:
                raise ConfigError(
                    f"ParameterDebugger.log_on_hooks={name!r}: this is not a hook with access to the "
                    f"model{did_you_mean(name, _HOOKS)}"
                )
            self.__dict__[name] = self._log_table

    def _log_table(self, trainer: Any, *_: Any, **__: Any) -> None:
        by_parameter: list[dict[str, str]] = []
        for name, parameter, owned in owned_gradients(trainer):
            row = {"Parameter": name}
            for kind, function, tensor in (("Param", self.param_fn, parameter), ("Grad", self.grad_fn, owned.whole)):
                if function is not None and tensor is not None:
                    figures = function(tensor.view(parameter.shape) if tensor.shape != parameter.shape else tensor)
                    row |= {f"{kind} {column}": str(value) for column, value in (figures or {}).items()}
            by_parameter.append(row)
        names = list(dict.fromkeys(column for row in by_parameter for column in row))
        if len(names) > 1:
            rows = [[row.get(column, "") for column in names] for row in by_parameter]
            logger.info("\n%s", "\n".join(columns(rows, head=names)))
