# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's features that it calls experimental."""

import lightning.pytorch as pl
from megatron.core.config import set_experimental_flag

from nemo2.config.capture import configurable


@configurable
class MegatronEnableExperimentalCallback(pl.Callback):
    """Before the model is built, turns on what Megatron-Core keeps behind its experimental flag, in this process and until it
    ends. Megatron-Core decides what that is, by version; none of it is tested here."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        set_experimental_flag(True)
