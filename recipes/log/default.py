# SPDX-License-Identifier: Apache-2.0
"""Defaults of a run's log folder, its checkpoints and its resume."""

from datetime import timedelta
from typing import Any, Optional

from lightning.pytorch.loggers import TensorBoardLogger

from nemo2.config import Config

CHECKPOINT_FILENAME = "{model_name}--{val_loss:.2f}-{step}-{consumed_samples}"


def tensorboard_logger(name: str, save_dir: str = "tb_logs") -> Config:
    """TensorBoard logs in ``save_dir`` below the run directory."""
    return Config(TensorBoardLogger, save_dir=save_dir, name=name)


def wandb_logger(project: str, name: str, entity: Optional[str] = None) -> Config:
    """A Weights & Biases logger. An ``entity`` of None is the user's own. The run's machine needs the package
    ``wandb``."""
    from lightning.pytorch.loggers import WandbLogger

    logger: Any = Config(WandbLogger, project=project, name=name)
    if entity is not None:
        logger.entity = entity
    return logger


def default_log(
    dir: Optional[str] = None,
    name: str = "default",
    tensorboard_logger: Optional[Config] = None,
    wandb_logger: Optional[Config] = None,
) -> Config:
    """Save a checkpoint every 15 minutes, and keep ten and the last one: those of validated steps by their loss, then the newest.

    ``dir`` holds all runs; None selects the logger's default. ``name`` is this run's folder in it.
    """
    from nemo2 import ModelCheckpoint, NeMoLogger

    checkpoint: Any = Config(
        ModelCheckpoint,
        save_last=True,
        save_top_k=10,
        train_time_interval=timedelta(minutes=15),
        filename=CHECKPOINT_FILENAME,
    )
    return Config(
        NeMoLogger,
        ckpt=checkpoint,
        name=name,
        tensorboard=tensorboard_logger,
        wandb=wandb_logger,
        log_dir=dir,
    )


def default_resume(resume_if_exists: bool = True, resume_ignore_no_checkpoint: bool = True) -> Config:
    """Resume from the newest checkpoint of a run of the same name, or start from the beginning if there is none."""
    from nemo2 import AutoResume

    return Config(
        AutoResume, resume_if_exists=resume_if_exists, resume_ignore_no_checkpoint=resume_ignore_no_checkpoint
    )
