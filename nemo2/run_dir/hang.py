# SPDX-License-Identifier: Apache-2.0
"""End a run in which nothing happens any more, and leave each rank's stacks."""

import faulthandler
import os
from pathlib import Path
from typing import Any, Optional

import lightning.pytorch as pl

from nemo2.config.capture import configurable
from nemo2.errors import ConfigError
from nemo2.files import open_to_write
from nemo2.run_dir.faults import FAULT_DIR_VARIABLE, stacks_file

DEFAULT_TIMEOUT_SECONDS = 1800.0
"""The default of torch's own time limit of a collective."""


@configurable
class HangWatchdog(pl.Callback):
    """Ends this process, its stacks written down, when neither a training step nor a validation batch ends for a while, nor the
    last save.

    ``llm.pretrain`` adds one with torch's 30 minutes unless the trainer has its own. Each rank watches itself, in a thread of
    Python's `faulthandler` that needs neither the interpreter's lock nor the rank's cooperation; ranks that wait for a hung
    one end at the same time as it does. A stopped process (SIGSTOP) can't end itself: its peers do, and the launcher ends it.
    A debugger is a hang, too: raise the timeout for that. Costs a new thread per step, some 50 us.

    Args:
        timeout_seconds: Without progress. It has to cover a step, a validation batch, a checkpoint that isn't saved in the
            background and, for the first step, compilation.

    Raises:
        ConfigError: the timeout isn't positive.
    """

    def __init__(self, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> None:
        if timeout_seconds <= 0:
            raise ConfigError(f"HangWatchdog.timeout_seconds={timeout_seconds}: must be more than 0 seconds.")
        self.timeout_seconds = timeout_seconds
        self._file: Any = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        directory = os.environ.get(FAULT_DIR_VARIABLE) or trainer.log_dir or trainer.default_root_dir
        Path(directory).mkdir(parents=True, exist_ok=True)
        file = stacks_file(directory, trainer.global_rank)
        self._file = open(file, "w", opener=open_to_write)  # noqa: SIM115  (the thread writes to it)
        self._progress()

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._progress()

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._progress()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self._progress()  # the last save is still to come

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop()

    def _progress(self) -> None:
        if self._file is not None:
            faulthandler.dump_traceback_later(self.timeout_seconds, exit=True, file=self._file)

    def _stop(self) -> None:
        file: Optional[Any] = self._file
        if file is None:
            return
        faulthandler.cancel_dump_traceback_later()
        self._file = None
        file.close()
        if os.path.getsize(file.name) == 0:
            os.unlink(file.name)
