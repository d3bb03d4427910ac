# SPDX-License-Identifier: Apache-2.0
"""What every rank of a short training run would import and ask first, done once by the process that ranks are forked from.

For commands of many short runs: as a module to preload, ``ranks.prepare("support.warm")``, or imported by a command that
forks ranks itself. It silences warnings and installs the backend's patches, so tests of these go without.
"""

import logging
import warnings

import torch

warnings.filterwarnings("ignore")
torch.set_num_threads(1)

import lightning.pytorch as pl  # noqa: E402
import torch._dynamo  # noqa: E402 # torch imports it when the first optimizer is made, which costs a second and more per rank
import torch.distributed.fsdp  # noqa: E402

import nemo2.checkpoint.model_checkpoint  # noqa: E402
import nemo2.models.llama  # noqa: E402
import nemo2.optim.megatron  # noqa: E402
import nemo2.strategies.fsdp  # noqa: E402
import nemo2.strategies.fsdp2  # noqa: E402
import nemo2.strategy  # noqa: E402
import nemo2.trainer  # noqa: E402, F401
from nemo2.backend import get_backend  # noqa: E402


def _log_once() -> None:
    """Half of what a rank of a short run spends is Lightning's first `log`: it asks of class after class whether it is a
    torchmetrics ``Metric``, and Python asks all of the 250 kinds of metric in turn. Ranks inherit the answers.

    Validation only: a process that has run a backward pass may not be forked.
    """

    class OneMetric(pl.LightningModule):
        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.log("metric", batch.sum())

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.validate(OneMetric(), torch.utils.data.DataLoader(torch.zeros(1, 1)), verbose=False)  # pyright: ignore[reportArgumentType]


get_backend().install()
for _name in ("lightning.pytorch", "lightning.fabric", "megatron"):
    logging.getLogger(_name).setLevel(logging.ERROR)
_log_once()
