# SPDX-License-Identifier: Apache-2.0
"""The entry points: what a recipe is a call of.

Each takes built objects (a recipe builds to one of these calls) and returns when the work is done. A failure on any rank is
an exception here, written down for the launcher (`nemo2.run_dir.faults`).
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional, Union

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint

from nemo2.checkpoint.auto_resume import AutoResume
from nemo2.checkpoint.model_checkpoint import ModelCheckpoint
from nemo2.checks.domains import parts_out_of_range
from nemo2.config.capture import captured_arguments, configurable
from nemo2.config.factories import refuse_text
from nemo2.errors import ConfigError
from nemo2.hugging_face.tokenizers import take_released_tokenizer
from nemo2.llm.commands import command
from nemo2.llm.connecting import connect_parts
from nemo2.optim.base import OptimizerModule
from nemo2.peft.base import PEFT
from nemo2.run_dir.faults import install_fault_hook
from nemo2.run_dir.hang import HangWatchdog, compare_collectives_after_a_hang
from nemo2.run_dir.logger import NeMoLogger
from nemo2.run_dir.orphans import end_with_parents
from nemo2.run_dir.preemption import PreemptionCallback
from nemo2.run_dir.resumed import ResumedRecipe
from nemo2.run_dir.run_folder import RunFolder
from nemo2.strategies.checkpoints import Checkpoints

_log = logging.getLogger(__name__)

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
) -> RunFolder:
    """Train a model from the beginning, or on from its last checkpoint. The tokenizer is the data's.

    Args:
        model: What is trained.
        data: Its batches.
        trainer: With its strategy, precision and callbacks.
        log: The run's directory, metrics and checkpoints. None: `NeMoLogger()` with its defaults.
        resume: Where to resume from. None: start fresh.
        optim: The optimizer and its schedule. None: the model's own.

    Returns:
        The run's directory: a path that also has the run's `metrics`, `best_checkpoint`, `report` and `plot`.
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
) -> RunFolder:
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
) -> RunFolder:
    """Train, with the tokenizer that is asked for.

    Args:
        model: What is trained. The path of a checkpoint: the model that it describes; its weights are those that ``resume``
            names, as ever.
        tokenizer: "data", "model", a tokenizer for both, or None to leave both as they are, but for a model that has none: it
            takes the data's.
        model_transform: A function of a module that returns a module, applied to each chunk of the model before it is wrapped
            for training; with a second argument ``name`` to each of its modules (`nemo2.parallel.transform`). It may replace
            modules and freeze parameters. None: the model's own, or that of the callback `ModelTransform`.

    The others are those of `pretrain`. Returns the run's directory.
    """
    model = _described(model, data)
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
    return RunFolder(run_directory)


@configurable(strategy="trainer.strategy")
def validate(
    model: pl.LightningModule,
    data: pl.LightningDataModule,
    trainer: pl.Trainer,
    log: Optional[NeMoLogger] = None,
    resume: Optional[AutoResume] = None,
    optim: Optional[OptimizerModule] = None,
    tokenizer: Optional[Any] = None,
    model_transform: Optional[Any] = None,
) -> RunFolder:
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
    return RunFolder(run_directory)


@configurable
def generate(
    path: str,
    trainer: Optional[pl.Trainer] = None,
    prompts: Optional[list[str]] = None,
    encoder_prompts: Optional[list[str]] = None,
    input_dataset: Optional[Any] = None,
    params_dtype: Optional[torch.dtype] = None,
    add_BOS: bool = False,
    max_batch_size: int = 4,
    random_seed: Optional[int] = None,
    inference_batch_times_seqlen_threshold: int = 1000,
    inference_params: Optional[Any] = None,
    text_only: bool = False,
    output_path: Optional[str] = None,
    enable_flash_decode: bool = True,
    max_new_tokens: Optional[int] = None,
    temperature: Optional[float] = None,
    top_k: Optional[int] = None,
    top_p: Optional[float] = None,
    trust_remote_code: bool = False,
    min_p: Optional[float] = None,
    stop: Optional[list[str]] = None,
    on_text: Optional[Callable[[int, str], None]] = None,
) -> list[Any]:
    """Complete prompts with the model of a checkpoint. Parameters up to ``enable_flash_decode`` are NeMo 2.0's, in its order.

    Args:
        path: A checkpoint directory; its ``context/`` tells which model and tokenizer it is of.
        trainer: With a `MegatronStrategy` whose layout the weights are loaded into. None: one process.
        prompts: One completion each.
        encoder_prompts: Must be None: there are no encoder-decoder models.
        input_dataset: In place of ``prompts``: a file of JSON objects, one a line, whose field ``input`` is the prompt; or a data
            module with such a file as ``test_path``.
        params_dtype: Of the parameters; with a trainer the same as its precision's. None: the trainer's, fp32 without one.
        add_BOS: Begin each prompt with the tokenizer's token for that.
        max_batch_size: Prompts that are completed at the same time.
        random_seed: Of the sampling; every rank draws the same. None: 1234.
        inference_batch_times_seqlen_threshold, enable_flash_decode: Kept for NeMo's signature: a batch goes through a pipeline
            as a whole, and Megatron-Core's static cache is used.
        inference_params: Megatron-Core's ``CommonInferenceParams`` (later ``SamplingParams``), in place of ``max_new_tokens``,
            ``temperature``, ``top_k`` and ``top_p``. A ``top_p`` of 0 doesn't narrow the choice.
        text_only: Return texts only.
        output_path: Write the completions there too, one JSON object per line: ``input`` and ``prediction``, ``label`` and the
            other fields of ``input_dataset``'s lines. None: only return them.
        max_new_tokens: Per prompt. None: 64.
        temperature, top_k, top_p, min_p: See `nemo2.models.sampling.Sampling`; temperature 0 takes the likeliest token. None:
            1.0, 0, 1.0 and 0.
        trust_remote_code: Build a tokenizer that was trained with ``AutoTokenizer(trust_remote_code=True)``, which runs Python
            that lies beside its files. Without it such a checkpoint is refused.
        stop: A text ends before the first of these words.
        on_text: Called on rank 0 with a prompt's place and each new piece of its completion, as it comes.

    Returns:
        One `nemo2.models.generate.Generation` per prompt (texts with ``text_only``), the same on every rank.

    Raises:
        CheckpointError: no checkpoint there, or it doesn't describe its model.
        ConfigError: no prompts, or settings that contradict each other.
    """
    from nemo2.llm.inference import HowToGenerate, generate_from_checkpoint, prompts_of

    if encoder_prompts is not None:
        raise ConfigError("encoder_prompts: there are no encoder-decoder models here. Leave it out.")
    if trainer is not None and not isinstance(trainer, pl.Trainer):
        raise ConfigError(f"trainer={trainer!r} is no trainer: NeMo's order is generate(path, trainer, prompts).")
    return generate_from_checkpoint(
        path,
        prompts_of(prompts, input_dataset),
        trainer=trainer,
        sampling=HowToGenerate.of(
            inference_params,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            stop=stop,
        ),
        random_seed=1234 if random_seed is None else random_seed,
        params_dtype=params_dtype,
        add_bos=add_BOS,
        max_batch_size=max_batch_size,
        text_only=text_only,
        output_path=output_path,
        trust_remote_code=trust_remote_code,
        on_text=on_text,
    )


def _described(model: Any, data: Any) -> Any:
    """The model that the checkpoint at this path describes; what is a model already is itself."""
    if not isinstance(model, str | Path) or not Path(model).is_dir():
        return model
    from nemo2.checkpoint.described import find_checkpoint, model_of

    return model_of(find_checkpoint(Path(model)), seq_length=getattr(data, "seq_length", None))


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
        _say_where_nothing_is_saved(trainer)
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


def _say_where_nothing_is_saved(trainer: pl.Trainer) -> None:
    """A line where a run has no checkpoint callback and nobody said that it needs none: NeMo 2.0 has Lightning's for such."""
    callbacks: list[pl.Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    told = "enable_checkpointing" in (captured_arguments(trainer) or {})
    if not told and not any(isinstance(item, Checkpoint) for item in callbacks):
        _log.warning(
            "This run saves no checkpoint: log=NeMoLogger(ckpt=ModelCheckpoint()) does, and "
            "Trainer(enable_checkpointing=False) says that none is wanted."
        )


def _watch(trainer: pl.Trainer) -> None:
    """Save and stop at SIGTERM, and end a run that hangs, unless the trainer says how it wants these."""
    callbacks: list[pl.Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    for kind in (PreemptionCallback, HangWatchdog):
        if not any(isinstance(item, kind) for item in callbacks):
            # In front: Lightning keeps checkpoint callbacks at the end, which then have a step's save behind them.
            callbacks.insert(0, kind())


for _entry_point in (pretrain, finetune, train, validate, generate):
    command(_entry_point)
