# SPDX-License-Identifier: Apache-2.0
"""DeepEP's dispatcher of tokens to experts, where the GPU has it."""

import logging

import lightning.pytorch as pl
import torch

from nemo2.config.adjust import adjust
from nemo2.config.capture import configurable
from nemo2.errors import ConfigError

logger = logging.getLogger(__name__)

_ARCHITECTURES = (8, 9)
"""Compute capabilities with DeepEP: Ampere and Ada, Hopper."""


@configurable
class DeepEPCallback(pl.Callback):
    """On GPUs that DeepEP knows, has it move tokens to experts: sets ``moe_token_dispatcher_type="flex"``,
    ``moe_enable_deepep=True`` and ``moe_shared_expert_overlap=False`` before the model is built. Elsewhere it says so once, and
    the model's own dispatcher stays. The package ``deep_ep`` must be installed, which Megatron-Core asks for.

    Raises:
        ConfigError: at set-up, a model without experts.
    """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        config = getattr(pl_module, "config", None)
        if config is None or not getattr(config, "num_moe_experts", None):
            raise ConfigError("DeepEPCallback: the model has no experts. Leave the callback out.")
        if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] not in _ARCHITECTURES:
            if trainer.is_global_zero:
                logger.warning("DeepEPCallback does not take effect: DeepEP runs on Ampere, Ada and Hopper GPUs only.")
            return
        for field, value in (
            ("moe_token_dispatcher_type", "flex"),
            ("moe_enable_deepep", True),
            ("moe_shared_expert_overlap", False),
        ):
            adjust(config, field, value, why="trainer.callbacks has a DeepEPCallback")
