# SPDX-License-Identifier: Apache-2.0
"""Prepares a trainer and a model without a loop, for code that needs a recipe's or checkpoint's model, sharded and
loaded."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Optional, Union

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import RunningStage, TrainerFn

from nemo2.mcore.parallel.megatron_parallel import MegatronParallel

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
    """Do the setup of `Trainer.fit` or `Trainer.validate` up to the first batch, without a loop after it. Every rank
    must call it.

    The trainer's strategy does the following, in this order:

    1. ``connect``: write sizes, precision and the machine's rules into the configurations of the model and the
      optimizer.
    2. ``setup_environment``: set up device, process groups, random streams, and the sampler of ``data``.
    3. Call ``setup`` of the callbacks given and of the model.
    4. ``strategy.setup``: build this rank's chunks (``configure_model``), transform them (``model_transform``), for
      "fit" wrap them in gradient buffers or shard them, and make the optimizer. Load the weights of ``restore_config``.
    5. Load ``checkpoint``: the weights, and for "fit" the optimizer's state.

    When the context ends, the checkpoint IO, CUDA graphs, the precision plugin and the accelerator are torn down.
    Process groups and the model stay usable, until the next layout of this process replaces the groups.

    Args:
        trainer: A trainer that isn't running.
        model: The model, connected to ``data`` (`connect_parts`).
        data: The data module, of which only the sampler is used. None: the caller passes batches to the chunks, if any.
        stage: "fit" creates what training needs. Other stages create only the model, in evaluation mode.
        checkpoint: A checkpoint directory. None: the model keeps its initial weights.
        callbacks: The callbacks whose ``setup`` is called.
        device: The model's device. None: this rank's. Meta: no memory is allocated.

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
        # Chunks of virtual stages after the first are not part of the model.
        for module in (model, parallel):
            module.train(stage == "fit")
        yield parallel
    finally:
        strategy.teardown()
