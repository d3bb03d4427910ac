# SPDX-License-Identifier: Apache-2.0
"""Applies a transform to the model, as a callback of the trainer."""

from collections.abc import Callable, Iterable
from typing import Any, Optional

import lightning.pytorch as pl
from torch import nn

from nemo2.base.errors import ConfigError
from nemo2.config.capture import configurable
from nemo2.config.walk import model_transforms


@configurable
class ModelTransform(pl.Callback):
    """Transform the model before it is wrapped for training: replace modules or freeze parameters.

    The strategy applies the transform once to each chunk of the model on every rank when it builds the model, also for
    validation. Weights are loaded afterwards. Steps cost nothing.

    Args:
        model_transform: A function that takes a module and returns a module. A function with a second argument ``name``
            is called with each module and its full name (`nemo2.mcore.parallel.transform`). None: the model's
            ``model_transform`` or the argument of ``llm.train``, both of which apply without this callback too.

    Raises:
        ConfigError: when a run begins, if there is no transform or the model has a different one.
    """

    def __init__(self, model_transform: Optional[Callable[..., nn.Module]] = None) -> None:
        self.model_transform = model_transform

    def check_recipe(self, recipe: Any) -> None:
        """Raise the errors of `setup` about a recipe."""
        self._refuse_none([transform for _, transform in model_transforms(recipe)])

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        self._refuse_none([getattr(pl_module, "model_transform", None)])

    def _refuse_none(self, others: Iterable[Any]) -> None:
        if all(one is None for one in (self.model_transform, *others)):
            raise ConfigError(
                "ModelTransform() has no function to apply. Set ModelTransform(model_transform=...), or set "
                "model.model_transform."
            )
