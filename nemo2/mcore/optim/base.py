# SPDX-License-Identifier: Apache-2.0
"""Optimizers and their schedules as objects of a recipe, separate from the model."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Optional

import lightning.pytorch as pl
from torch.nn import Parameter
from torch.optim import Optimizer

from nemo2.base.errors import ConfigError
from nemo2.mcore.optim.lr_scheduler import LRSchedulerModule

NONFINITE_ADVICE = (
    "This step changed no parameters and saved nothing. Run the same command again to resume from the last checkpoint. "
    "If the error recurs, lower optim.config.lr, lengthen the warm-up or set optim.config.clip_grad. To skip such steps, "
    "add the callback LossGuard(on_nonfinite='skip'). To find the operation, set trainer.detect_anomaly=True."
)


ParamCondition = Callable[[str, Parameter], bool]


def check_lr_mult(lr_mult: float, scale_lr_cond: Optional[ParamCondition], rate: str) -> None:
    """Check the two settings that scale some learning rates. ``rate`` names the setting of the learning rate.

    Raises:
        ConfigError: ``lr_mult`` is set without ``scale_lr_cond``.
    """
    if lr_mult != 1.0 and scale_lr_cond is None:
        raise ConfigError(
            f"optim.lr_mult={lr_mult} has no effect without optim.scale_lr_cond, which selects the parameters. Set "
            f"both, or change {rate}."
        )


class OptimizerModule(pl.Callback, ABC):
    """Make the optimizers of a model. Subclass it and define `optimizers`.

    Args:
        lr_scheduler: The learning-rate schedule. None: a constant learning rate.
    """

    makes_torch_optimizers: bool = False
    """Whether the optimizers are torch's, which don't support parameters that Megatron-Core shards."""

    def __init__(self, lr_scheduler: Optional[LRSchedulerModule] = None) -> None:
        self.lr_scheduler = lr_scheduler

    def connect(self, model: pl.LightningModule) -> None:
        """Make this the model's optimizer.

        Sets ``model.optim``, which the strategy reads, and ``model.configure_optimizers``, which Lightning calls.
        """
        model.optim = self  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]

        def configure_optimizers(megatron_parallel: Any = None) -> list[dict[str, Any]]:
            return self(model, megatron_parallel)

        model.configure_optimizers = configure_optimizers  # pyright: ignore[reportAttributeAccessIssue]

    def schedule_over(self, max_steps: int) -> None:
        """Set the length of a schedule that has none to ``max_steps``. -1 leaves the schedule unchanged."""
        if self.lr_scheduler is not None and getattr(self.lr_scheduler, "max_steps", None) is None and max_steps > 0:
            self.lr_scheduler.max_steps = max_steps  # pyright: ignore[reportAttributeAccessIssue]

    @abstractmethod
    def optimizers(self, model: Any) -> list[Optimizer]:
        """The optimizers for ``model``, a `MegatronParallel` or a plain module."""

    def __call__(self, model: pl.LightningModule, megatron_parallel: Any = None) -> list[dict[str, Any]]:
        """The value of Lightning's ``configure_optimizers``: one dictionary per optimizer, with its schedule."""
        optimizers = self.optimizers(megatron_parallel if megatron_parallel is not None else model)
        if self.lr_scheduler is None:
            return [{"optimizer": optimizer} for optimizer in optimizers]
        return [
            {"optimizer": optimizer, "lr_scheduler": self.lr_scheduler(model, optimizer)} for optimizer in optimizers
        ]
