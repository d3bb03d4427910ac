# SPDX-License-Identifier: Apache-2.0
"""Records every allocation on a GPU, for https://pytorch.org/memory_viz."""

import logging
import os
from pathlib import Path
from typing import Any, Optional, Union

import lightning.pytorch as pl
import torch

from nemo2.base.counts import count_problems
from nemo2.base.errors import ConfigError
from nemo2.base.files import recording_to
from nemo2.callbacks.steps import chosen_ranks, warn_of_absent_ranks
from nemo2.config.capture import configurable
from nemo2.training.run_dir.directory import create_directory, directory_of

logger = logging.getLogger(__name__)
FOLDER = "memory"


@configurable
class MemoryProfileCallback(pl.Callback):
    """Write ``rank-N.pickle`` with the allocations of a GPU when training ends or fails, for example when it runs out
    of memory.

    Open the file in torch's viewer. nemo2 never reads it. Recording starts before the model is built and costs a few
    percent of the time. The file of an earlier start is kept as ``rank-N.1.pickle``. On a machine without a GPU the callback
    reports once that it records nothing, and the run continues.

    Args:
        dir: The folder of the files. None: ``memory`` in the run directory, or in the working directory without one.
        warn_cycles: Warn about reference cycles that hold GPU tensors until Python's garbage collector runs.
        ranks: The global ranks that record. Empty: all.
        max_entries: The number of allocations and frees to keep, newest first. Each takes about 1 kB of host memory.

    Raises:
        ConfigError: a rank or a number that can't work. At the start of the run: the folder isn't writable.
    """

    written_to = "dir"

    def __init__(
        self,
        dir: Optional[Union[str, os.PathLike]] = None,
        warn_cycles: bool = True,
        ranks: Optional[list[int]] = None,
        max_entries: int = 200_000,
    ) -> None:
        problems: list[str] = []
        self.ranks = chosen_ranks("MemoryProfileCallback", ranks, problems) if ranks else []
        problems += count_problems("MemoryProfileCallback", max_entries=max_entries)
        if problems:
            raise ConfigError("\n".join(problems))
        self.dir = dir
        self.warn_cycles = warn_cycles
        self.max_entries = max_entries
        self._recording = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        warn_of_absent_ranks("MemoryProfileCallback", self.ranks, trainer)
        if self._recording or (self.ranks and trainer.global_rank not in self.ranks):
            return
        if not torch.cuda.is_available():
            logger.warning(
                "MemoryProfileCallback records the memory of GPUs, but this machine has no GPU. It records nothing."
            )
            return
        # A failure at the end of training would come before the last checkpoint.
        create_directory(self._folder(trainer), field="MemoryProfileCallback.dir")
        if self.warn_cycles:
            from torch.utils.viz._cycles import warn_tensor_cycles

            warn_tensor_cycles()
        torch.cuda.memory._record_memory_history(max_entries=self.max_entries)
        self._recording = True

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._write(trainer)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._write(trainer)

    def _write(self, trainer: Any) -> None:
        if not self._recording:
            return
        self._recording = False
        path = self._folder(trainer) / f"rank-{trainer.global_rank}.pickle"
        with recording_to(path, owner="MemoryProfileCallback"):
            torch.cuda.memory._dump_snapshot(str(path))
            logger.info("memory snapshot: %s (open it at https://pytorch.org/memory_viz)", path)
        torch.cuda.memory._record_memory_history(enabled=None)

    def _folder(self, trainer: Any) -> Path:
        return Path(self.dir).expanduser() if self.dir else directory_of(trainer) / FOLDER
