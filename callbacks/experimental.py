# SPDX-License-Identifier: Apache-2.0
"""Enables Megatron-Core's experimental features."""

import lightning.pytorch as pl
from megatron.core.config import set_experimental_flag

from nemo2.config.capture import configurable


@configurable
class MegatronEnableExperimentalCallback(pl.Callback):
    """Turn on Megatron-Core's experimental flag before the model is built, in this process and until it ends.

    Megatron-Core's version decides which features the flag enables. nemo2 tests none of them.
    """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        set_experimental_flag(True)
