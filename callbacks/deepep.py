# SPDX-License-Identifier: Apache-2.0
"""Enables DeepEP's token dispatcher on GPUs that support it."""

import logging
from typing import Any

import lightning.pytorch as pl
import torch

from nemo2.base.errors import ConfigError
from nemo2.config.capture import configurable
from nemo2.config.provenance import adjust

logger = logging.getLogger(__name__)

_ARCHITECTURES = (8, 9, 10)
"""The major compute capabilities that DeepEP supports: 8 (Ampere and Ada, inside a node), 9 (Hopper), 10 (B200, B300).
Source: DeepEP at commit dd758caf: ``setup.py`` compiles for 9.0, or for 8.0 with DISABLE_SM90_FEATURES=1, and the README has
its speed on SM90 and SM100."""


@configurable
class DeepEPCallback(pl.Callback):
    """Use DeepEP to dispatch tokens to experts on GPUs that support it.

    Before the model is built the callback sets ``moe_token_dispatcher_type="flex"``, ``moe_flex_dispatcher_backend="deepep"``
    and ``moe_shared_expert_overlap=False``. Megatron-Core then requires the package ``deep_ep``. On other devices the
    callback reports once that it changes nothing, and the model keeps its dispatcher.

    Raises:
        ConfigError: at setup, if the model has no experts.
    """

    def check_model(self, config: Any) -> None:
        """Raise the error of `setup` about the model's configuration."""
        if config is None or not getattr(config, "num_moe_experts", None):
            raise ConfigError("DeepEPCallback: the model has no experts. Remove the callback.")

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        config = getattr(pl_module, "config", None)
        self.check_model(config)
        if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] not in _ARCHITECTURES:
            if trainer.is_global_zero:
                logger.warning(
                    "DeepEPCallback does not take effect: DeepEP runs on GPUs of compute capability 8.x, 9.x and 10.x only."
                )
            return
        for field, value in (
            ("moe_token_dispatcher_type", "flex"),
            ("moe_flex_dispatcher_backend", "deepep"),
            ("moe_shared_expert_overlap", False),
        ):
            adjust(config, field, value, why="trainer.callbacks has a DeepEPCallback")
