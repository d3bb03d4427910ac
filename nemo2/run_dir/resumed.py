# SPDX-License-Identifier: Apache-2.0
"""Reports the changes in the recipe of a resumed run before its checkpoint is loaded."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback

from nemo2.checkpoint.changes import Changes, changes_since
from nemo2.errors import CheckpointError
from nemo2.run_dir.records import CHANGES_FILE, write_text


class ResumedRecipe(Callback):
    """Compare the run with the run that wrote ``checkpoint``. Rank 0 compares, and every rank receives the result.

    Hook: ``on_fit_start``, when the model is set up and nothing is loaded.
    """

    def __init__(self, checkpoint: Path, log_dir: Path, *, accept_changes: bool) -> None:
        self.checkpoint = checkpoint
        self.log_dir = log_dir
        self.accept_changes = accept_changes

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """
        Raises:
            CheckpointError: on every rank, if a setting doesn't fit the checkpoint and changes aren't accepted.
        """
        found = trainer.strategy.broadcast(changes_since(self.checkpoint, trainer) if trainer.is_global_zero else None)
        if found.unfit and not self.accept_changes:
            raise CheckpointError(
                f"The recipe doesn't fit {self.checkpoint}, from which the run would resume: {'; '.join(found.unfit)}. "
                "Undo the changes, set another log.name to start a new run, or set resume.accept_changes=True "
                "(--accept-changes) to resume anyway."
            )
        if trainer.is_global_zero:
            self._tell(found)

    def _tell(self, found: Changes) -> None:
        from lightning.pytorch.utilities.rank_zero import rank_zero_info  # pyright: ignore[reportPrivateImportUsage]

        write_text(self.log_dir / CHANGES_FILE, json.dumps(asdict(found), indent=1) + "\n")
        if found:
            rank_zero_info("The recipe has changed since %s:\n  %s", self.checkpoint.name, "\n  ".join(found.lines()))
