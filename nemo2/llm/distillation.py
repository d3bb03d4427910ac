# SPDX-License-Identifier: Apache-2.0
"""``llm.distill``: trains a student on the output distributions of a teacher (`nemo2.training.strategies.distillation`)."""

from pathlib import Path
from typing import Any, Optional

import lightning.pytorch as pl

from nemo2.base.advice import print_warning
from nemo2.base.errors import ConfigError
from nemo2.checkpoint.auto_resume import AutoResume, RestoreConfig
from nemo2.config import Config
from nemo2.config.aliases import parameter_names
from nemo2.config.capture import captured_arguments, configurable
from nemo2.config.walk import callbacks_of, class_of
from nemo2.hugging_face.checkpoint import Checkpoint, find_checkpoint
from nemo2.llm.api import train
from nemo2.mcore.optim.base import OptimizerModule
from nemo2.training.run_dir.logger import NeMoLogger
from nemo2.training.strategies.distillation import DistillationCallback as DistillationCallback
from nemo2.training.strategies.distillation import DistillationConfig as DistillationConfig


@configurable(strategy="trainer.strategy")
def distill(
    student_model_path: str,
    teacher_model_path: str,
    data: pl.LightningDataModule,
    trainer: pl.Trainer,
    distillation_config_path: Optional[str] = None,
    log: Optional[NeMoLogger] = None,
    resume: Optional[AutoResume] = None,
    optim: Optional[OptimizerModule] = None,
    tokenizer: Optional[Any] = None,
    model_transform: Optional[Any] = None,
    distillation_config: Optional[DistillationConfig] = None,
) -> Path:
    """Train a student on a teacher's output distributions.

    The parameters up to ``model_transform`` are NeMo 2.0's, in NeMo's order. Those that are not listed here are those
    of `nemo2.llm.train`. The reported training loss is the distillation loss. Validation reports the loss on the text.

    Args:
        student_model_path: The student's initial checkpoint, for example one that `prune` wrote, or a run's directory.
        teacher_model_path: The teacher's checkpoint. The teacher must have the student's vocabulary, and uses the
            student's layout. Its sizes may differ.
        trainer: A trainer with a `MegatronStrategy` without virtual stages.
        distillation_config_path: A YAML file with the settings of `DistillationConfig`. None: ``distillation_config``.
        resume: Where an interrupted run resumes from. None: nowhere. In both cases the run's initial weights are the
            student's.
        optim: The optimizer. None: the student's own.
        tokenizer: As in `nemo2.llm.train`. None: the student's, also for data without a tokenizer.
        distillation_config: The settings. None: their defaults.

    Returns:
        The run's directory. Its checkpoints hold the student only.

    Raises:
        CheckpointError: a checkpoint is missing or doesn't describe its model.
        ConfigError: both configurations are given, the vocabularies differ, the layout doesn't divide the sizes, or a
            checkpoint holds adapters only.
    """
    if distillation_config_path is not None and distillation_config is not None:
        raise ConfigError("distillation_config_path and distillation_config set the same thing. Keep one of them.")
    settings = distillation_config
    if distillation_config_path is not None:
        settings = DistillationConfig.from_file(Path(distillation_config_path))
    start = Checkpoint.open(student_model_path).require_nemo2()
    start.refuse_adapters()
    student = start.model(seq_length=getattr(data, "seq_length", None))
    teaching = DistillationCallback(teacher_model_path, settings)
    if optim is not None:
        optim.connect(student)
    teaching.refuse(student, trainer.strategy)
    resume = resume or AutoResume(resume_if_exists=True, resume_ignore_no_checkpoint=True)
    if tokenizer is None and student.tokenizer is not None and "tokenizer" not in (captured_arguments(data) or ()):
        tokenizer = "model"
    restore = resume.restore_config
    if restore is not None and Checkpoint.open(restore.path) != start:
        raise ConfigError(
            f"resume.restore_config.path={str(restore.path)!r}: the student already starts from "
            f"student_model_path={str(student_model_path)!r}. Remove resume.restore_config."
        )
    resume.restore_config = restore or RestoreConfig(path=start.source)
    callbacks: list[pl.Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    callbacks.append(teaching)
    return train(
        model=student,
        data=data,
        trainer=trainer,
        log=log,
        resume=resume,
        optim=optim,
        tokenizer=tokenizer,
        model_transform=model_transform,
    )


def distillation_recipe(student: Path, teacher: Path, recipe: Any, distillation_config: Optional[Any] = None) -> Any:
    """Turn ``recipe`` into a distillation: its model becomes the student, starting from its checkpoint, with the
    teacher beside it.

    Check, rehearsal, plan and launch accept the result like any other recipe.

    Args:
        student, teacher: Checkpoints, or runs' directories.
        recipe: A configured call of ``llm.pretrain`` or ``llm.finetune``. It is changed, but its trainer, data and
            optimizer stay.
        distillation_config: A configured `DistillationConfig`. None: its defaults.

    Raises:
        CheckpointError: a checkpoint is missing or doesn't describe its model.
        ConfigError: the student's checkpoint holds adapters only.
    """
    start = Checkpoint.open(student).require_nemo2()
    start.refuse_adapters()
    recipe.model = start.model_config(follow_data=True)
    tokenizer = start.tokenizer_config()
    if "tokenizer" in parameter_names(class_of(recipe.data)):
        recipe.data.tokenizer = tokenizer
    recipe.model.tokenizer = tokenizer
    if "peft" in parameter_names(recipe.__fn_or_cls__) and recipe.peft is not None:
        print_warning(
            f"peft={class_of(recipe.peft).__name__} has no effect: a distillation trains all parameters of the student."
        )
        recipe.peft = None
    recipe.resume = Config(
        AutoResume,
        restore_config=Config(RestoreConfig, path=start.source),
        resume_if_exists=True,
        resume_ignore_no_checkpoint=True,
    )
    settings: dict[str, Any] = {} if distillation_config is None else {"distillation_config": distillation_config}
    teaching = Config(DistillationCallback, teacher_model_path=str(find_checkpoint(teacher)), **settings)
    recipe.trainer.callbacks = [*callbacks_of(recipe.trainer), teaching]
    return recipe
