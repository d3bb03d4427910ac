# SPDX-License-Identifier: Apache-2.0
"""The entry points: what a recipe is a call of.

Each takes built objects (a recipe builds to one of these calls) and returns when the work is done. A failure on any rank is
an exception here, written down for the launcher (`nemo2.run_dir.faults`).
"""

from pathlib import Path
from typing import Any, Optional, Union

import lightning.pytorch as pl

from nemo2.checkpoint.auto_resume import AutoResume
from nemo2.checkpoint.model_checkpoint import ModelCheckpoint
from nemo2.checks.domains import parts_out_of_range
from nemo2.config.capture import configurable
from nemo2.config.factories import refuse_text
from nemo2.errors import ConfigError
from nemo2.hugging_face.tokenizers import take_released_tokenizer
from nemo2.llm.commands import command
from nemo2.llm.set_up import connect_parts
from nemo2.optim.base import OptimizerModule
from nemo2.peft.base import PEFT
from nemo2.run_dir.faults import install_fault_hook
from nemo2.run_dir.hang import HangWatchdog, compare_collectives_after_a_hang
from nemo2.run_dir.logger import NeMoLogger
from nemo2.run_dir.orphans import end_with_parents
from nemo2.run_dir.preemption import PreemptionCallback
from nemo2.run_dir.resumed import ResumedRecipe
from nemo2.strategies.checkpoints import Checkpoints

install_fault_hook()
end_with_parents()
compare_collectives_after_a_hang()


@configurable(strategy="trainer.strategy")
def pretrain(
    model: pl.LightningModule,
    data: pl.LightningDataModule,
    trainer: pl.Trainer,
    log: Optional[NeMoLogger] = None,
    resume: Optional[AutoResume] = None,
    optim: Optional[OptimizerModule] = None,
) -> Path:
    """Train a model from the beginning, or on from its last checkpoint. The tokenizer is the data's.

    Args:
        model: What is trained.
        data: Its batches.
        trainer: With its strategy, precision and callbacks.
        log: The run's directory, metrics and checkpoints. None: `NeMoLogger()` with its defaults.
        resume: Where to resume from. None: start fresh.
        optim: The optimizer and its schedule. None: the model's own.

    Returns:
        The run's directory.
    """
    return train(model=model, data=data, trainer=trainer, log=log, resume=resume, optim=optim, tokenizer="data")


@configurable(strategy="trainer.strategy")
def finetune(
    model: pl.LightningModule,
    data: pl.LightningDataModule,
    trainer: pl.Trainer,
    log: Optional[NeMoLogger] = None,
    resume: Optional[AutoResume] = None,
    optim: Optional[OptimizerModule] = None,
    peft: Optional[PEFT] = None,
    tokenizer: Optional[Any] = "model",
) -> Path:
    """Train a model on from weights that ``resume.restore_config`` names, all of it or what a PEFT method adds.

    Args:
        peft: The method, such as `nemo2.peft.LoRA`. Everything else is frozen, and checkpoints hold what is trained only, with a
            reference to the weights that the run began with. None: all parameters are trained.
        tokenizer: As in `train`.

    The others are those of `pretrain`. Returns the run's directory.
    """
    if peft is not None:
        _save_only_what_is_trained(trainer)
    return train(
        model=model,
        data=data,
        trainer=trainer,
        log=log,
        resume=resume,
        optim=optim,
        tokenizer=tokenizer,
        model_transform=peft,
    )


@configurable(strategy="trainer.strategy")
def train(
    model: pl.LightningModule,
    data: pl.LightningDataModule,
    trainer: pl.Trainer,
    log: Optional[NeMoLogger] = None,
    resume: Optional[AutoResume] = None,
    optim: Optional[OptimizerModule] = None,
    tokenizer: Optional[Any] = None,
    model_transform: Optional[Any] = None,
) -> Path:
    """Train, with the tokenizer that is asked for.

    Args:
        tokenizer: "data", "model", a tokenizer for both, or None to leave both as they are.
        model_transform: A function of a module that returns a module, applied to each chunk of the model before it is wrapped
            for training; with a second argument ``name`` to each of its modules (`nemo2.parallel.transform`). It may replace
            modules and freeze parameters. None: the model's own, or that of the callback `ModelTransform`.

    The others are those of `pretrain`. Returns the run's directory.
    """
    run_directory = _setup(
        model=model,
        data=data,
        trainer=trainer,
        log=log,
        resume=resume,
        optim=optim,
        tokenizer=tokenizer,
        model_transform=model_transform,
    )
    trainer.fit(model, data, ckpt_path=trainer.ckpt_path)
    return run_directory


@configurable(strategy="trainer.strategy")
def validate(
    model: pl.LightningModule,
    data: pl.LightningDataModule,
    trainer: pl.Trainer,
    log: Optional[NeMoLogger] = None,
    resume: Optional[AutoResume] = None,
    optim: Optional[OptimizerModule] = None,
    tokenizer: Optional[Any] = "data",
    model_transform: Optional[Any] = None,
) -> Path:
    """Measure the validation loss of a checkpoint; arguments as `train`. Returns the run's directory.

    The weights come from ``resume``: the checkpoint it finds or names, or the weights it restores.
    """
    run_directory = _setup(
        model=model,
        data=data,
        trainer=trainer,
        log=log,
        resume=resume,
        optim=optim,
        tokenizer=tokenizer,
        model_transform=model_transform,
        training=False,
    )
    trainer.validate(model, data, ckpt_path=trainer.ckpt_path)
    return run_directory


@configurable
def generate(
    path: str,
    prompts: list[str],
    trainer: Optional[pl.Trainer] = None,
    max_new_tokens: int = 64,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    random_seed: int = 1234,
    output_path: Optional[str] = None,
    trust_remote_code: bool = False,
) -> list[Any]:
    """Complete prompts with the model of a checkpoint.

    Args:
        path: A checkpoint directory; its ``context/`` tells which model and tokenizer it is of.
        prompts: One completion each.
        trainer: With a `MegatronStrategy` whose layout the weights are loaded into. None: one process.
        max_new_tokens: Per prompt.
        temperature, top_k, top_p: As in `nemo2.models.generate.generate`; temperature 0 takes the likeliest token.
        random_seed: Of the sampling; every rank draws the same.
        output_path: Write the completions there too, one JSON object per line. None: only return them.
        trust_remote_code: Build a tokenizer that was trained with ``AutoTokenizer(trust_remote_code=True)``, which runs Python
            that lies beside its files. Without it such a checkpoint is refused.

    Returns:
        One `nemo2.models.generate.Generation` per prompt, the same on every rank.

    Raises:
        CheckpointError: no checkpoint there, or it doesn't describe its model.
    """
    from nemo2.llm.inference import generate_from_checkpoint

    return generate_from_checkpoint(
        path,
        prompts,
        trainer=trainer,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        random_seed=random_seed,
        output_path=output_path,
        trust_remote_code=trust_remote_code,
    )


def _save_only_what_is_trained(trainer: pl.Trainer) -> None:
    strategy = trainer.strategy
    if isinstance(strategy, Checkpoints):
        strategy.save_only_what_is_trained()


def _setup(
    *,
    model: pl.LightningModule,
    data: pl.LightningDataModule,
    trainer: pl.Trainer,
    log: Optional[NeMoLogger],
    resume: Optional[AutoResume],
    optim: Optional[OptimizerModule],
    tokenizer: Union[str, Any, None],
    model_transform: Optional[Any],
    training: bool = True,
) -> Path:
    """Connect the parts of a run. Nothing is computed, and no process group exists yet."""
    refuse_text(train, {"model": model, "data": data, "log": log, "resume": resume, "optim": optim}, of="")
    log = log or NeMoLogger()
    connect_parts(model, data, optim=optim, tokenizer=tokenizer, model_transform=model_transform)
    _refuse_out_of_range(model, data, training=training)
    directory = log.setup(trainer, resume_if_exists=getattr(resume, "resume_if_exists", False))
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(callback, ModelCheckpoint) and callback.model_name is None:
            callback.model_name = directory.name or None
    if training:
        _watch(trainer)
    if resume is not None:
        checkpoint = resume.setup(trainer, model, training=training, directory=directory.checkpoints, data=data)
        if checkpoint is None:
            take_released_tokenizer(resume.restore_config, model, data)
        if training and checkpoint is not None:
            told = ResumedRecipe(checkpoint, directory.log_dir, accept_changes=resume.accept_changes)
            trainer.callbacks.insert(0, told)  # pyright: ignore[reportAttributeAccessIssue]
    return Path(directory.log_dir)


def _refuse_out_of_range(model: Any, data: Any, *, training: bool) -> None:
    """A recipe was checked before it was launched; parts that a script has made are judged here, by the same table.

    Raises:
        ConfigError: with every number that can't be computed with, a paragraph each.
    """
    told = list(parts_out_of_range(model=model, data=data, optim=getattr(model, "optim", None) if training else None))
    if told:
        raise ConfigError("\n".join(told))


def _watch(trainer: pl.Trainer) -> None:
    """Save and stop at SIGTERM, and end a run that hangs, unless the trainer says how it wants these."""
    callbacks: list[pl.Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    for kind in (PreemptionCallback, HangWatchdog):
        if not any(isinstance(item, kind) for item in callbacks):
            # In front: Lightning keeps checkpoint callbacks at the end, which then have a step's save behind them.
            callbacks.insert(0, kind())


for _entry_point in (pretrain, finetune, train, validate, generate):
    command(_entry_point)
