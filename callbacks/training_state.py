# SPDX-License-Identifier: Apache-2.0
"""Detects modules that validation left in evaluation mode."""

import logging
from typing import Any, Optional

import lightning.pytorch as pl

from nemo2.base.counts import require_counts
from nemo2.base.errors import RuntimeFault
from nemo2.config.capture import configurable
from nemo2.mcore.parallel.inspection import chunks_of

logger = logging.getLogger(__name__)


@configurable
class ModelTrainingStateCallback(pl.Callback):
    """Report modules whose mode, training or evaluation, differs after validation from before it.

    Without a report, dropout for example would silently behave differently. The callback reads each module's flag
    before and after a validation, on every rank.

    Args:
        val_check_interval: Steps between two readings before a validation, at most the trainer's
            ``val_check_interval``.
        strict: Raise an error. False: warn.

    Raises:
        ConfigError: an interval below 1.
        RuntimeFault: modes differ and ``strict`` is set.
    """

    def __init__(self, val_check_interval: int = 10, strict: bool = False) -> None:
        require_counts("ModelTrainingStateCallback", val_check_interval=val_check_interval)
        self.val_check_interval = val_check_interval
        self.strict = strict
        self._before: Optional[dict[str, bool]] = None
        self._validated = False

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_step % self.val_check_interval == 0:
            self._before = _modes(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validated = True

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        self._compare(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._compare(trainer)

    def _compare(self, trainer: Any) -> None:
        before, self._before = (self._before, None) if self._validated else (None, self._before)
        self._validated = False
        if before is None:
            return
        changed = [name for name, training in _modes(trainer).items() if before.get(name, training) != training]
        if not changed:
            return
        message = (
            f"At step {trainer.global_step}, {len(changed)} modules have a different mode than before validation: "
            f"{', '.join(changed[:5])}. A validation hook called eval() or train() and did not undo it. Restore the "
            "mode in that hook."
        )
        if self.strict:
            raise RuntimeFault(message)
        logger.warning(message)


def _modes(trainer: Any) -> dict[str, bool]:
    return {
        f"{index}.{name}": module.training
        for index, chunk in enumerate(chunks_of(trainer))
        for name, module in chunk.named_modules()
    }
