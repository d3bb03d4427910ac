# SPDX-License-Identifier: Apache-2.0
"""Reports the changes in the recipe of a resumed run before its checkpoint is loaded."""

import json
import logging
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info  # pyright: ignore[reportPrivateImportUsage]

from nemo2.base.advice import new_name
from nemo2.base.errors import CheckpointError
from nemo2.training.run_dir.records import CHANGES_FILE, write_text

_log = logging.getLogger(__name__)


class ResumedRecipe(Callback):
    """Compare the run with the run that wrote ``checkpoint``. Rank 0 compares, and every rank receives the result.

    Hooks: ``on_fit_start``, when the model is set up and nothing is loaded; ``on_fit_end``, which reports that the
    checkpoint was already at the end of training.
    """

    def __init__(self, checkpoint: Path, log_dir: Path, *, accept_changes: bool) -> None:
        self.checkpoint = checkpoint
        self.log_dir = log_dir
        self.accept_changes = accept_changes
        self._trains = False

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """
        Raises:
            CheckpointError: on every rank, if a setting doesn't fit the checkpoint and changes aren't accepted.
        """
        # `effective_config` asks every run for this class. Only a run that resumes compares.
        from nemo2.checkpoint.changes import changes_since, unfit_message

        changes = trainer.strategy.broadcast(
            changes_since(self.checkpoint, trainer) if trainer.is_global_zero else None
        )
        if changes.unfit and not self.accept_changes:
            raise CheckpointError(unfit_message(self.checkpoint, changes.unfit))
        if trainer.is_global_zero:
            write_text(self.log_dir / CHANGES_FILE, json.dumps(changes.to_dict(), indent=1) + "\n")
            if changes:
                lines = "\n  ".join(changes.lines())
                rank_zero_info("The recipe has changed since %s:\n  %s", self.checkpoint.name, lines)

    def on_train_batch_start(self, trainer: Any, *_: Any, **__: Any) -> None:
        self._trains = True

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if not self._trains and trainer.is_global_zero:
            limits = [f"trainer.{name}={getattr(trainer, name)}" for name in ("max_steps", "max_epochs")]
            _log.warning(
                "No step was trained: %s is at step %d, where %s end training. To train further, raise the limit. For a new "
                "run, %s.",
                self.checkpoint,
                trainer.global_step,
                " and ".join(limits),
                new_name(),
            )
