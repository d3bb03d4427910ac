# SPDX-License-Identifier: Apache-2.0
"""A trainer and a model made ready without a loop: for what wants the model of a recipe or a checkpoint, sharded and loaded."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Optional, Union

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import RunningStage, TrainerFn

from nemo2.parallel.megatron_parallel import MegatronParallel

_STATES = {
    "fit": (TrainerFn.FITTING, RunningStage.TRAINING),
    "validate": (TrainerFn.VALIDATING, RunningStage.VALIDATING),
    "predict": (TrainerFn.PREDICTING, RunningStage.PREDICTING),
}


@contextmanager
def set_up(
    trainer: pl.Trainer,
    model: pl.LightningModule,
    data: Optional[pl.LightningDataModule] = None,
    *,
    stage: Literal["fit", "validate", "predict"] = "predict",
    checkpoint: Optional[Union[str, Path]] = None,
    callbacks: Iterable[pl.Callback] = (),
    device: Optional[torch.device] = None,
) -> Iterator[MegatronParallel]:
    """The set-up that `Trainer.fit` or `Trainer.validate` does up to its first batch, with no loop after it. Every rank calls it.

    In this order, each by the trainer's strategy:

    1. sizes, precision and the machine's rules are written into the model's and the optimizer's configuration (``connect``);
    2. device, process groups, random streams, and the sampler of ``data`` (``setup_environment``);
    3. ``setup`` of the callbacks given and of the model;
    4. this rank's chunks are built (``configure_model``), transformed (``model_transform``) and, for "fit", wrapped in gradient
       buffers or sharded, and the optimizer is made (``strategy.setup``); weights of ``restore_config`` are loaded;
    5. ``checkpoint`` is loaded: weights, and for "fit" the optimizer's state too.

    On leaving, the checkpoint IO, CUDA graphs, the precision plugin and the accelerator are torn down. Process groups and the
    model stay: both can be used, and the next layout of this process replaces the groups.

    Args:
        trainer: One that isn't running.
        model: Connected to ``data`` (`connect_parts`).
        data: For its sampler only; nothing is loaded. None: batches, if any, are given to the chunks by hand.
        stage: "fit" makes what training needs; the others only the model, in evaluation mode.
        checkpoint: A checkpoint directory. None: the weights are those the model was built with.
        callbacks: Those whose ``setup`` is called.
        device: Where the model is put. None: this rank's. Meta: nothing has memory.

    Yields:
        This rank's chunks.

    Raises:
        ConfigError: a setting that can't work.
        CheckpointError: ``checkpoint`` can't be loaded into the model.
    """
    strategy: Any = trainer.strategy
    trainer.state.fn, trainer.state.stage = _STATES[stage]
    model.trainer = trainer
    strategy.connect(model)
    strategy.data_sampler = strategy.data_sampler or getattr(data, "data_sampler", None)
    strategy.setup_environment()
    if device is not None:
        strategy.parallel_devices = [device] * len(strategy.parallel_devices)
    try:
        for callback in callbacks:
            callback.setup(trainer, model, stage)
        model.setup(stage)
        model.configure_model()
        strategy.setup(trainer)
        if checkpoint is not None:
            strategy.load_model_state_dict(strategy.load_checkpoint(checkpoint))
        parallel: MegatronParallel = strategy.megatron_parallel
        # Chunks of virtual stages beyond the first are no part of the model.
        for module in (model, parallel):
            module.train(stage == "fit")
        yield parallel
    finally:
        strategy.teardown()
