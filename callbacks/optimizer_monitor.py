# SPDX-License-Identifier: Apache-2.0
"""Norms of gradients, parameter by parameter."""

from collections import defaultdict

import lightning.pytorch as pl
import torch

from nemo2.config.capture import configurable
from nemo2.parallel.inspection import gathered, owned_gradients


@configurable
class OptimizerMonitor(pl.Callback):
    """Logs ``l2_norm/grad/<parameter>``, the norm of each parameter's gradient in the whole model, and ``l2_norm/grad/global``,
    that of all of them: after their reduction over data-parallel ranks, before clipping, on the steps that log.

    Names are those of the whole model, whatever layout shards it: tensor-parallel ranks', pipeline stages' and the distributed
    optimizer's parts are summed. A logged step costs a norm per parameter and one gather of as many numbers; the others
    cost nothing.
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
        for found in gathered(mine):
            for name, square in found.items():
                squares[name] += square
        for name, square in squares.items():
            pl_module.log(f"l2_norm/grad/{name.removeprefix('module.')}", square**0.5, batch_size=1)
        pl_module.log("l2_norm/grad/global", sum(squares.values()) ** 0.5, batch_size=1)
