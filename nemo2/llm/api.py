# SPDX-License-Identifier: Apache-2.0
"""The entry points that recipes call: `pretrain`, `finetune`, `train`, `validate` and `generate`.

Each entry point takes built objects and returns when the work is done. A failure on any rank raises an exception on
that rank, and the rank writes a fault file for the launcher (`nemo2.training.run_dir.faults`).
"""

import logging
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, Optional, Union

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint

from nemo2.base.advice import typed_as
from nemo2.base.counts import require_counts
from nemo2.base.errors import ConfigError, DataError
from nemo2.base.files import output_file
from nemo2.checkpoint.auto_resume import AutoResume, starts_from_weights
from nemo2.checkpoint.model_checkpoint import ModelCheckpoint
from nemo2.config.capture import captured_arguments, configurable
from nemo2.config.notices import warn_without_effect
from nemo2.data.base import explaining_changed_inputs
from nemo2.llm.commands import command
from nemo2.mcore.optim.base import OptimizerModule
from nemo2.models.peft.base import PEFT
from nemo2.preflight.checks.parts import check_parts
from nemo2.training.connecting import connect_parts
from nemo2.training.run_dir.faults import install_fault_hook
from nemo2.training.run_dir.hang import HangWatchdog, compare_collectives_after_a_hang
from nemo2.training.run_dir.logger import NeMoLogger
from nemo2.training.run_dir.parent_watchdog import end_with_parents
from nemo2.training.run_dir.preemption import PreemptionCallback
from nemo2.training.run_dir.run_folder import RunFolder
from nemo2.training.strategies.base import BaseStrategy

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
    """Train a model from its initial weights, or resume training from its last checkpoint. The tokenizer is the data's.

    Args:
        model: The model to train.
        data: The data module that provides its batches.
        trainer: The trainer, with its strategy, precision and callbacks.
        log: The run's directory, metrics and checkpoints. None: `NeMoLogger()` with its defaults.
        resume: Where to resume from. None: the run starts from the beginning.
        optim: The optimizer and its learning-rate schedule. None: the model's own.

    Returns:
        The run's directory: a path that also offers the run's `metrics`, `best_checkpoint`, `report` and `plot`.
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
    """Train a model that starts from the weights in ``resume.restore_config``: all parameters, or only those of a PEFT
    method.

    The arguments that are not listed here are those of `pretrain`. Returns the run's directory.

    Args:
        peft: A PEFT method such as `nemo2.models.peft.LoRA`. All other parameters are frozen. Checkpoints then hold only the
            trained parameters and a reference to the weights that the run started from. None: all parameters are
            trained.
        tokenizer: As in `train`.
    """
    if peft is not None and isinstance(trainer.strategy, BaseStrategy):
        trainer.strategy.save_trained_parameters_only()
    return _train(
        model=model,
        data=data,
        trainer=trainer,
        log=log,
        resume=resume,
        optim=optim,
        tokenizer=tokenizer,
        model_transform=peft,
        # A warning only: the model may load weights of its own.
        without_weights="llm.finetune starts from random weights, because resume.restore_config is not set. Set its path to a "
        "checkpoint, to an imported model (nemo://organisation/name) or to a Hugging Face release "
        "(hf:///folder, hf://organisation/name).",
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
    """Train a model with a chosen tokenizer.

    The arguments that are not listed here are those of `pretrain`. Returns the run's directory.

    Args:
        model: The model to train, or the path of a checkpoint that describes it. A path gives the architecture only;
            the weights always come from ``resume``.
        tokenizer: "data" or "model": both use this part's tokenizer. A tokenizer object: both use it. None: both keep
            their own. With "model" and None, a model without a tokenizer takes the data's.
        model_transform: A function that takes a module and returns a module. It is applied to each chunk of the model
            before the chunk is wrapped for training. A function with a second argument ``name`` is applied to each
            module of the chunk (`nemo2.mcore.parallel.transform`). It may replace modules and freeze parameters. None: the
            model's own transform, or that of the callback `ModelTransform`.
    """
    return _train(
        model=model,
        data=data,
        trainer=trainer,
        log=log,
        resume=resume,
        optim=optim,
        tokenizer=tokenizer,
        model_transform=model_transform,
    )


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
    """Measure the validation loss of a checkpoint. The arguments are those of `train`. Returns the run's directory.

    The weights come from ``resume``: the checkpoint that it finds or names, or the weights that it restores.

    Raises:
        ConfigError: ``trainer.limit_val_batches`` is 0.
        DataError: the data has no validation samples.
    """
    refuse_no_validation(trainer)
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
        without_weights="llm.validate measures the model's initial weights, because resume names no checkpoint and finds none. "
        "Set resume.restore_config.path to the weights to measure.",
    )
    with explaining_changed_inputs(data):
        trainer.validate(model, data)
    if sum(trainer.num_val_batches) == 0:
        raise DataError(
            f"{type(data).__name__} has no batch for validation, so nothing was measured. Give it validation samples."
        )
    return RunFolder(run_directory)


def refuse_no_validation(trainer: Any) -> None:
    """Raise ConfigError if a trainer, or its config, would validate nothing."""
    if (limit := trainer.limit_val_batches) is not None and limit == 0:
        raise ConfigError(
            f"trainer.limit_val_batches={limit!r}: with 0, nothing is measured. Set it to 1 or more, or to None for no limit."
        )


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
    """Complete prompts with the model of a checkpoint.

    The parameters up to ``enable_flash_decode`` are NeMo 2.0's, in NeMo's order.

    Args:
        path: A checkpoint directory, whose ``context/`` describes the model and the tokenizer, a run's directory, or released
            weights (``hf://organisation/name``, or their folder).
        trainer: A trainer with a `MegatronStrategy`; the weights are loaded into its layout. None: one process.
        prompts: The prompts. Each gets one completion.
        encoder_prompts: Must be None, because nemo2 has no encoder-decoder models.
        input_dataset: Prompts from a file, in place of ``prompts``: a file with one JSON object per line, whose field
            ``input`` is the prompt, or a data module with such a file as ``test_path``. "-": standard input.
        params_dtype: The dtype of the parameters. With a trainer it must equal the dtype of the trainer's precision.
            None: the trainer's dtype, or fp32 without a trainer.
        add_BOS: Begin each prompt with the tokenizer's begin-of-sequence token.
        max_batch_size: The number of prompts that are completed at the same time.
        random_seed: The seed of the sampling. Every rank draws the same tokens. None: 1234.
        inference_batch_times_seqlen_threshold, enable_flash_decode: Accepted for NeMo's signature, without effect. A
            batch goes through a pipeline as a whole, and generation uses Megatron-Core's static cache.
        inference_params: Megatron-Core's ``CommonInferenceParams`` (``SamplingParams`` in later versions), in place of
            ``max_new_tokens``, ``temperature``, ``top_k`` and ``top_p``. A ``top_p`` of 0 does not narrow the choice.
        text_only: Return texts only.
        output_path: A file that also receives the completions, one JSON object per line: ``input``, ``prediction``, and
            ``label`` and the other fields of ``input_dataset``'s lines. An existing file is replaced. "-": standard output.
            None: the completions are only returned.
        max_new_tokens: The largest number of new tokens per prompt. None: 64.
        temperature, top_k, top_p, min_p: See `nemo2.models.sampling.Sampling`. A temperature of 0 picks the likeliest
            token. None: 1.0, 0, 1.0 and 0.
        trust_remote_code: Build a tokenizer that was trained with ``AutoTokenizer(trust_remote_code=True)``, which runs
            the Python code beside its files. False: a checkpoint with such a tokenizer is rejected.
        stop: Words that end a completion. The text ends before the first of them.
        on_text: A function that rank 0 calls with the index of a prompt and each new piece of its completion.

    Returns:
        One `nemo2.models.generate.Generation` per prompt (texts with ``text_only``), the same on every rank.

    Raises:
        CheckpointError: ``path`` holds no checkpoint, or the checkpoint does not describe its model.
        ConfigError: there are no prompts, or settings contradict each other.
    """
    from nemo2.llm import inference
    from nemo2.models.generate import generate as complete
    from nemo2.models.generate import read_prompts

    warn_without_effect(
        "A batch goes through a pipeline as a whole, and generation uses Megatron-Core's static cache.",
        inference_batch_times_seqlen_threshold=(inference_batch_times_seqlen_threshold, 1000),
        enable_flash_decode=(enable_flash_decode, True),
    )
    if encoder_prompts is not None:
        raise ConfigError("encoder_prompts: nemo2 has no encoder-decoder models. Remove this argument.")
    require_counts("", others=(None,), max_batch_size=max_batch_size)
    records = inference.prompts_of(prompts, input_dataset)
    options = inference.GenerationOptions.of(
        inference_params,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        stop=stop,
    )
    trainer = trainer or inference.single_process_trainer(params_dtype)
    inference.refuse_another_dtype(trainer, params_dtype)
    if output_path not in (None, inference.STANDARD):
        target = output_file(output_path)
        if input_dataset is not None and target.resolve() == inference.prompts_file(input_dataset).resolve():
            raise ConfigError(
                f"{typed_as('output_path', target, option='--output')} is the file of the prompts. Name another."
            )
    texts = [record["input"] for record in records]

    def read(model: Any) -> None:
        length = model.config.seq_length
        ids = read_prompts(model.tokenizer, texts, max_sequence_length=length, add_bos=add_BOS)
        inference.warn_of_short_answers(ids, max_new_tokens=options.max_new_tokens, max_sequence_length=length)

    with inference.loaded(path, trainer, trust_remote_code=trust_remote_code, before=read) as model:
        results = complete(
            model,
            model.tokenizer,
            texts,
            **asdict(options),
            seed=1234 if random_seed is None else random_seed,
            max_sequence_length=model.config.seq_length,
            max_batch_size=max_batch_size,
            add_bos=add_BOS,
            on_text=on_text if trainer.is_global_zero else None,
        )
    if output_path is not None and trainer.is_global_zero:
        inference.write_completions(output_path, records, results)
    return [result.text for result in results] if text_only else results


def _train(*, model: Any, data: pl.LightningDataModule, trainer: pl.Trainer, **parts: Any) -> RunFolder:
    """`train`, with the arguments of `_setup`."""
    model = _described(model, data)
    run_directory = _setup(model=model, data=data, trainer=trainer, **parts)
    with explaining_changed_inputs(data):
        trainer.fit(model, data)  # from trainer.ckpt_path, if the run resumes
    return RunFolder(run_directory)


def _described(model: Any, data: Any) -> Any:
    """The model that the checkpoint at this path describes. A value that is not the path of a directory is returned
    unchanged."""
    if not isinstance(model, str | Path) or not Path(model).is_dir():
        return model
    from nemo2.hugging_face.checkpoint import Checkpoint

    return Checkpoint.open(model).model(seq_length=getattr(data, "seq_length", None))


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
    without_weights: Optional[str] = None,
) -> Path:
    """Connect the parts of a run. Computes nothing, and needs no process group. ``without_weights``: the warning if the run
    neither resumes nor starts from weights."""
    log = log or NeMoLogger()
    parts = {"model": model, "data": data, "trainer": trainer, "log": log, "resume": resume}
    parts |= {"optim": optim or getattr(model, "optim", None) if training else None, "tokenizer": tokenizer}
    peft = {"peft" if isinstance(model_transform, PEFT) else "model_transform": model_transform}
    check_parts(finetune if "peft" in peft else train, parts | peft)
    connect_parts(model, data, optim=optim, tokenizer=tokenizer, model_transform=model_transform)
    directory = log.setup(
        trainer,
        resume_if_exists=getattr(resume, "resume_if_exists", False),
        checkpoint_in=resume.checkpoint_in if resume is not None else lambda directory: None,
    )
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(callback, ModelCheckpoint) and callback.model_name is None:
            callback.model_name = directory.name or None
    if training:
        _warn_without_checkpoints(trainer)
        _watch(trainer)
    checkpoint = None
    if resume is not None:
        checkpoint = resume.setup(trainer, model, training=training, directory=directory.checkpoints, data=data)
        if training and checkpoint is not None:
            from nemo2.training.run_dir.resumed import ResumedRecipe

            resumed = ResumedRecipe(checkpoint, directory.log_dir, accept_changes=resume.accept_changes)
            trainer.callbacks.insert(0, resumed)  # pyright: ignore[reportAttributeAccessIssue]
    if without_weights is not None and checkpoint is None and not starts_from_weights(resume, trainer.strategy):
        _log.warning("%s", without_weights)
    return Path(directory.log_dir)


def _warn_without_checkpoints(trainer: pl.Trainer) -> None:
    """Warn when a run has no checkpoint callback and the user did not ask for none.

    NeMo 2.0 adds Lightning's checkpoint callback in this case.
    """
    callbacks: list[pl.Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    requested = "enable_checkpointing" in (captured_arguments(trainer) or {})
    if not requested and not any(isinstance(item, Checkpoint) for item in callbacks):
        _log.warning(
            "This run saves no checkpoint. Set log=NeMoLogger(ckpt=ModelCheckpoint()) to save checkpoints, or "
            "Trainer(enable_checkpointing=False) if you want none."
        )


def _watch(trainer: pl.Trainer) -> None:
    """Add the callbacks that save and stop at SIGTERM and that end a run that hangs, unless the trainer has its own."""
    callbacks: list[pl.Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    for kind in (PreemptionCallback, HangWatchdog):
        if not any(isinstance(item, kind) for item in callbacks):
            # In front: Lightning keeps checkpoint callbacks at the end, so a step is saved before these callbacks act
            # on it.
            callbacks.insert(0, kind())


for _entry_point in (pretrain, finetune, train, validate, generate):
    command(_entry_point)


def __getattr__(name: str) -> Any:
    """NeMo's ``llm.api`` has all entry points, `export_ckpt` and `ptq` among them."""
    if name.startswith("_"):
        raise AttributeError(name)
    return getattr(import_module("nemo2.llm"), name)
