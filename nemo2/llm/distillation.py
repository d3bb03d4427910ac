# SPDX-License-Identifier: Apache-2.0
"""``llm.distill``: a student is trained on the distributions of a teacher (`nemo2.strategies.teaching`)."""

from pathlib import Path
from typing import Any, Optional

import lightning.pytorch as pl

from nemo2.checkpoint.auto_resume import AutoResume, RestoreConfig
from nemo2.checkpoint.context import load_context
from nemo2.checkpoint.described import find_checkpoint, model_of
from nemo2.config import Config
from nemo2.config.aliases import parameter_names
from nemo2.config.capture import captured_arguments, configurable
from nemo2.config.walk import class_of
from nemo2.errors import ConfigError
from nemo2.llm.api import train
from nemo2.optim.base import OptimizerModule
from nemo2.run_dir.logger import NeMoLogger
from nemo2.strategies.teaching import DistillationCallback as DistillationCallback
from nemo2.strategies.teaching import DistillationConfig as DistillationConfig
from nemo2.strategies.teaching import described_model, refuse_additions


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
    """Train a student on a teacher's distributions. Parameters up to ``model_transform`` are NeMo 2.0's, in its order.

    Args:
        student_model_path: The checkpoint that the student begins as, such as `prune` writes, or a run's directory.
        teacher_model_path: The teacher's. It has the student's vocabulary and its layout; sizes may differ.
        trainer: With a `MegatronStrategy` without virtual stages.
        distillation_config_path: A YAML file with the settings of `DistillationConfig`. None: ``distillation_config``.
        resume: Where the run resumes from, if it was interrupted. None: nowhere; either way its first weights are the student's.
        optim: None: the student's own.
        tokenizer: As `nemo2.llm.train`. None: the student's, also for data that was made without one.
        distillation_config: None: its defaults.

    The others are those of `nemo2.llm.train`. The training loss that is reported is the one that is learned from; validation
    reports the text's.

    Returns:
        The run's directory. Its checkpoints are of the student alone.

    Raises:
        CheckpointError: no checkpoint, or none that describes its model.
        ConfigError: two of the configurations, another vocabulary, or sizes that the layout doesn't divide.
    """
    if distillation_config_path is not None and distillation_config is not None:
        raise ConfigError("distillation_config_path and distillation_config say the same: give one of them.")
    settings = distillation_config
    if distillation_config_path is not None:
        settings = DistillationConfig.from_file(Path(distillation_config_path))
    start = find_checkpoint(Path(student_model_path))
    student = model_of(start, seq_length=getattr(data, "seq_length", None))
    teaching = DistillationCallback(teacher_model_path, settings)
    if optim is not None:
        optim.connect(student)
    teaching.refuse(student, trainer.strategy)
    resume = resume or AutoResume(resume_if_exists=True, resume_ignore_no_checkpoint=True)
    if tokenizer is None and student.tokenizer is not None and "tokenizer" not in (captured_arguments(data) or ()):
        tokenizer = "model"
    given = resume.restore_config
    if given is not None and find_checkpoint(Path(given.path)) != start:
        raise ConfigError(
            f"resume.restore_config.path={str(given.path)!r}: the student begins as "
            f"student_model_path={str(student_model_path)!r}. Leave it out."
        )
    resume.restore_config = given or RestoreConfig(path=str(start))
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
    """``recipe`` with the student as its model, which begins as its checkpoint, and the teacher beside it. Check, rehearsal, plan
    and launch take it as any other.

    Args:
        student, teacher: Checkpoints, or runs' directories.
        recipe: A configured call of ``llm.pretrain`` or ``llm.finetune``, whose trainer, data and optimizer stay; it is changed.
        distillation_config: A configured `DistillationConfig`. None: its defaults.

    Raises:
        CheckpointError: no checkpoint, or none that describes its model.
        ConfigError: the student's checkpoint holds additions only.
    """
    start = find_checkpoint(student)
    refuse_additions(start)
    recipe.model = described_model(start)
    tokenizer = load_context(start, "tokenizer", build=False)
    if "tokenizer" in parameter_names(class_of(recipe.data)):
        recipe.data.tokenizer = tokenizer
    recipe.model.tokenizer = tokenizer
    if "peft" in parameter_names(recipe.__fn_or_cls__):
        recipe.peft = None
    recipe.resume = Config(
        AutoResume,
        restore_config=Config(RestoreConfig, path=str(start.absolute())),
        resume_if_exists=True,
        resume_ignore_no_checkpoint=True,
    )
    settings: dict[str, Any] = {} if distillation_config is None else {"distillation_config": distillation_config}
    teaching = Config(DistillationCallback, teacher_model_path=str(find_checkpoint(teacher).absolute()), **settings)
    recipe.trainer.callbacks = [*(recipe.trainer.callbacks or []), teaching]
    return recipe
