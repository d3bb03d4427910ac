# SPDX-License-Identifier: Apache-2.0
"""Imports and first questions of every rank of a short training run, done once by the server that ranks are forked from: a
rank that trains two steps takes a tenth of the time. No filter and no setting is left behind; `support.quiet` has those.
"""

import functools
import gc
import importlib
import importlib.metadata
import warnings

import lightning.pytorch as pl
import pytest  # noqa: F401 # the module of a test imports it, in every rank
import torch
import torch._dynamo  # torch imports it when the first optimizer is made, which costs a second and more per rank
import torch.distributed.fsdp
from lightning.fabric.utilities import registry

# Not `nemo2.llm.api`: a process that imports it is a rank from then on, watched and with its errors written down.
import nemo2.checkpoint.loading
import nemo2.checkpoint.model_checkpoint
import nemo2.hugging_face.exporting
import nemo2.hugging_face.importing
import nemo2.mcore.optim.megatron
import nemo2.models.conversion.families
import nemo2.models.deepseek
import nemo2.models.generate
import nemo2.models.llama
import nemo2.training.connecting
import nemo2.training.run_dir.resumed
import nemo2.training.strategies.fsdp
import nemo2.training.strategies.fsdp2
import nemo2.training.strategy
import nemo2.training.trainer
from nemo2.base.backend import cpu, extras


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


torch.set_num_threads(1)
# Each trainer asks which callbacks the installed distributions bring, and each first group which backends: Python reads the
# files of all of them for it.
registry.entry_points = functools.cache(registry.entry_points)
importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)
extras.requirements("te")
# Whoever converts weights asks every family, whose dataclasses take seconds to make.
nemo2.models.conversion.families.families()
_log_once()
with warnings.catch_warnings(action="ignore"):
    # What Megatron-Core imports when it makes an optimizer, and in the first save.
    importlib.import_module("megatron.core.models.mimo")
    importlib.import_module("megatron.core.dist_checkpointing.strategies.state_dict_saver")
    for patch in cpu._patches():  # pyright: ignore[reportPrivateUsage]
        if patch.applies_to(importlib.metadata.version("megatron-core")):
            patch.resolve()  # imports what the backend of CPUs replaces something in; nothing is replaced
gc.collect()
gc.freeze()  # what is loaded stays: a rank that collects its garbage after a run doesn't look through a million objects
