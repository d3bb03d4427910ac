# SPDX-License-Identifier: Apache-2.0
"""Logs gradient norms per parameter."""

from collections import defaultdict

import lightning.pytorch as pl
import torch

from nemo2.base import ranks
from nemo2.config.capture import configurable
from nemo2.mcore.parallel.inspection import owned_gradients


@configurable
class OptimizerMonitor(pl.Callback):
    """Log ``l2_norm/grad/<parameter>``, the gradient norm of each parameter, and ``l2_norm/grad/global``, the norm of
    all gradients.

    The norms are taken on the steps that log, after the reduction over data-parallel ranks and before clipping.
    Parameters have their names in the whole model, and each norm covers the whole parameter, however the layout shards
    it. A logged step costs one norm per parameter and one gather of as many numbers. Other steps cost nothing.
    """

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        step = trainer.global_step + 1
        if step % max(1, trainer.log_every_n_steps):  # pyright: ignore[reportAttributeAccessIssue]
            return
        mine = {
            name: owned.gradient.double().square().sum().item()
            for name, _, owned in owned_gradients(trainer)
            if owned.gradient is not None
        }
        squares: dict[str, float] = defaultdict(float)
        for of_rank in ranks.gather(mine):
            for name, square in of_rank.items():
                squares[name] += square
        for name, square in squares.items():
            pl_module.log(f"l2_norm/grad/{name.removeprefix('module.')}", square**0.5, batch_size=1)
        pl_module.log("l2_norm/grad/global", sum(squares.values()) ** 0.5, batch_size=1)
