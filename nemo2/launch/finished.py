# SPDX-License-Identifier: Apache-2.0
"""Rejects the launch of a run that is finished or cannot be resumed in one place, before its processes start."""

from typing import Any

from nemo2.checkpoint.auto_resume import refuse_unresumable
from nemo2.checks.earlier import checkpoints_to_resume


def refuse_finished_run(recipe: Any) -> None:
    """Raise the error that every rank of this run would raise, if the run's folder on this machine shows that it is
    finished or cannot be resumed.

    Raises:
        CheckpointError: the recipe resumes a run that has reached ``trainer.max_steps``, or whose only checkpoint holds
            weights without the optimizer. The message says how to continue.
    """
    directory = checkpoints_to_resume(recipe)
    if directory is not None:
        refuse_unresumable(directory, max_steps=recipe.trainer.max_steps, past_end=recipe.resume.resume_past_end)
