# SPDX-License-Identifier: Apache-2.0
"""A transform of the model as a callback of the trainer."""

from collections.abc import Callable
from typing import Any, Optional

import lightning.pytorch as pl
from torch import nn

from nemo2.config.capture import configurable
from nemo2.errors import ConfigError


@configurable
class ModelTransform(pl.Callback):
    """Transforms the model before it is wrapped for training: replaces modules, freezes parameters.

    The strategy applies the transform to each chunk of the model on every rank when it builds the model, once, also where it
    only validates; weights are loaded after that. A step costs nothing.

    Args:
        model_transform: A function of a module that returns a module; with a second argument ``name`` it is called with each
            module and its full name (`nemo2.parallel.transform`). None: the model's own ``model_transform``, or the one that
            ``llm.train`` was given, which are applied without this callback too.

    Raises:
        ConfigError: when a run begins, there is nothing to apply, or the model has another transform.
    """

    def __init__(self, model_transform: Optional[Callable[..., nn.Module]] = None) -> None:
        self.model_transform = model_transform

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        if self.model_transform is None and getattr(pl_module, "model_transform", None) is None:
            raise ConfigError(
                "ModelTransform() has nothing to apply: give it a function (ModelTransform(model_transform=...)), or set "
                "model.model_transform."
            )
