# SPDX-License-Identifier: Apache-2.0
"""A trainer and a model made ready without a loop: for what wants the model of a recipe or a checkpoint, sharded and loaded."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Optional, Union

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import RunningStage, TrainerFn

from nemo2.config.explicit import explicit_fields
from nemo2.errors import ConfigError
from nemo2.models.conversion.families import modules_with_weights
from nemo2.models.walker import linear_layers
from nemo2.optim.base import OptimizerModule
from nemo2.parallel.megatron_parallel import MegatronParallel
from nemo2.parallel.transform import refuse_two_transforms
from nemo2.peft.base import PEFT
from nemo2.settle.agreement import follow_the_data

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


def connect_parts(
    model: Any,
    data: Any,
    *,
    optim: Optional[OptimizerModule] = None,
    tokenizer: Any = None,
    model_transform: Optional[Any] = None,
) -> None:
    """Tell the parts of a run of each other: one sequence length, loss, tokenizer, optimizer and transform. Nothing is computed.

    Args:
        optim: The model's optimizer. None: its own.
        tokenizer: "data" or "model": whose serves both (a model without one takes the data's); or a tokenizer.
            None: both keep what they have; a model without one takes the data's.
        model_transform: The model's transform. None: its own, if any.

    Raises:
        ConfigError: two parts contradict each other.
    """
    _share_what_data_decides(model, data)
    _share_tokenizer(model, data, tokenizer)
    _share_transform(model, model_transform)
    if optim is not None:
        optim.connect(model)


def _share_what_data_decides(model: Any, data: Any) -> None:
    """One fact: the data's sequence length is the model's, unless both were set; and so is its loss.

    Raises:
        ConfigError: both lengths were set, and differ.
    """
    config: Any = getattr(model, "config", None)
    length = getattr(data, "seq_length", None)
    if config is None:
        return
    if length is not None and "seq_length" in explicit_fields(config) and config.seq_length != length:
        raise ConfigError(
            f"model.config.seq_length={config.seq_length} contradicts data.seq_length={length}: set it on the data only, and the "
            "model follows."
        )
    follow_the_data(config, data)


def _share_transform(model: Any, model_transform: Any) -> None:
    """Make it the model's.

    Raises:
        ConfigError: the model has another.
    """
    if model_transform is None:
        return
    own = getattr(model, "model_transform", None)
    if model_transform is own:
        return
    given = {"model_transform": model_transform, "model.model_transform": own}
    refuse_two_transforms({place: transform for place, transform in given.items() if transform is not None})
    if isinstance(model_transform, PEFT):
        config = getattr(model, "config", None)
        model_transform.refuse_unknown_targets(linear_layers(config))
        model_transform.refuse_unknown_modules(modules_with_weights(config))
    model.model_transform = model_transform


def _share_tokenizer(model: Any, data: Any, tokenizer: Any) -> None:
    if tokenizer is None:
        if getattr(model, "tokenizer", None) is None:
            model.tokenizer = getattr(data, "tokenizer", None)
        return
    if tokenizer == "data":
        model.tokenizer = getattr(data, "tokenizer", None)
    elif tokenizer == "model" and getattr(model, "tokenizer", None) is not None:
        data.tokenizer = model.tokenizer
    elif tokenizer == "model":
        model.tokenizer = getattr(data, "tokenizer", None)  # the only one that there is
    elif isinstance(tokenizer, str):
        raise ConfigError(f"tokenizer={tokenizer!r}: must be 'data', 'model' or a tokenizer.")
    else:
        model.tokenizer = data.tokenizer = tokenizer
