# SPDX-License-Identifier: Apache-2.0
"""Rejects the launch of a run that is finished or cannot be resumed in one place, before its processes start."""

from pathlib import Path
from typing import Any

from nemo2.checkpoint.auto_resume import refuse_unresumable
from nemo2.run_dir.directory import CHECKPOINTS, DEFAULT_BASE, newest_run

_TRAINING = ("pretrain", "finetune", "train")


def refuse_finished_run(recipe: Any) -> None:
    """Raise the error that every rank of this run would raise, if the run's folder on this machine shows that it is
    finished or cannot be resumed.

    Raises:
        CheckpointError: the recipe resumes a run that has reached ``trainer.max_steps``, or whose only checkpoint holds
            weights without the optimizer. The message says how to continue.
    """
    parts: list[Any] = [getattr(recipe, name, None) for name in ("resume", "log", "trainer")]
    if getattr(getattr(recipe, "__fn_or_cls__", None), "__name__", "") not in _TRAINING or None in parts:
        return
    resume, log, trainer = parts
    if resume.resume_from_path or resume.resume_from_directory:
        return
    if not resume.resume_if_exists or getattr(log.ckpt, "dirpath", None) is not None:
        return
    base = Path(log.log_dir or DEFAULT_BASE).expanduser() / (log.name or "default")
    if log.explicit_log_dir:
        directory = Path(log.explicit_log_dir).expanduser()
    else:
        directory = base / log.version if log.version else newest_run(base)
    if directory is not None:
        refuse_unresumable(
            (directory / CHECKPOINTS).absolute(), max_steps=trainer.max_steps, past_end=resume.resume_past_end
        )
