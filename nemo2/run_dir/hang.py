# SPDX-License-Identifier: Apache-2.0
"""End a run in which nothing happens any more, and leave each rank's stacks."""

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Optional

import lightning.pytorch as pl

from nemo2.config.capture import configurable
from nemo2.errors import ConfigError
from nemo2.files import open_to_write
from nemo2.place import here
from nemo2.run_dir.faults import FAULT_DIR_VARIABLE, stacks_file
from nemo2.run_dir.stalls import LifeSign, mark_stopped, place_of

DEFAULT_TIMEOUT_SECONDS = 1800.0
"""The default of torch's own time limit of a collective."""
_GIL_SECONDS = 3.0
"""A process in which no thread of Python's gets a turn for so long after the limit is ended from outside the interpreter."""


@configurable
class HangWatchdog(pl.Callback):
    """Ends this process, its stacks written down, when neither a training step nor a validation batch ends for a while, nor the
    last save.

    ``llm.pretrain`` adds one with torch's 30 minutes unless the trainer has its own. Each rank watches itself, in a thread, and
    behind that one of Python's `faulthandler`, which needs neither the interpreter's lock nor the rank's cooperation; ranks
    that wait for a hung one end at the same time as it does. A stopped process (SIGSTOP) can't end itself: a peer on its
    machine does, for torchrun would wait half a minute more. A debugger is a hang, too: raise the timeout for that. Costs a
    new thread per step, some 50 us.

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
        self._life: Optional[LifeSign] = None
        self._deadline = 0.0
        self._over = threading.Event()
        self._rank = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        launched = os.environ.get(FAULT_DIR_VARIABLE)
        directory = launched or trainer.log_dir or trainer.default_root_dir
        Path(directory).mkdir(parents=True, exist_ok=True)
        self._rank = trainer.global_rank
        self._file = open(stacks_file(directory, self._rank), "w", opener=open_to_write)  # noqa: SIM115  (threads write to it)
        # On this machine's disk: a shared file system isn't written to after each step of each rank.
        self._life = LifeSign(directory, self._rank) if launched and trainer.num_nodes == 1 else None
        self._progress(trainer)
        self._over.clear()
        threading.Thread(target=self._watch, args=(directory,), daemon=True, name="hang").start()

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self._progress(trainer)

    def on_validation_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self._progress(trainer)

    def on_train_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self._progress(trainer)  # the last save is still to come

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop()

    def _progress(self, trainer: pl.Trainer) -> None:
        if self._file is None:
            return
        self._deadline = time.monotonic() + self.timeout_seconds
        faulthandler.dump_traceback_later(self.timeout_seconds + _GIL_SECONDS, exit=True, file=self._file)
        if self._life is not None:
            self._life.give(trainer.global_step)

    def _stop(self) -> None:
        file: Optional[Any] = self._file
        if file is None:
            return
        faulthandler.cancel_dump_traceback_later()
        self._over.set()
        self._file = None
        file.close()
        if os.path.getsize(file.name) == 0:
            os.unlink(file.name)
        if self._life is not None:
            self._life.end()

    def _watch(self, directory: str) -> None:
        while not self._over.wait(max(0.0, self._deadline - time.monotonic())):
            if time.monotonic() >= self._deadline:
                self._end(directory)

    def _end(self, directory: str) -> None:
        file = self._file
        if file is None:
            return
        limit = timedelta(seconds=self.timeout_seconds)
        file.write(f"Timeout ({limit})!\n")
        file.flush()
        faulthandler.dump_traceback(file=file)
        with contextlib.suppress(OSError):
            where = place_of(Path(file.name).read_text(encoding="utf-8", errors="replace"))
            print(
                f"error: rank {self._rank}: no step ended within {limit} (h:mm:ss): {where}.",
                file=sys.stderr,
                flush=True,
            )
        end_stopped_siblings(directory)
        os._exit(1)


def end_stopped_siblings(directory: str) -> list[int]:
    """Kill the ranks of this rank's torchrun that are stopped; their process ids. They can do nothing by themselves, and
    torchrun gives each half a minute to end."""
    if here().launcher != "torchrun":
        return []
    ended = []
    for process in Path("/proc").iterdir() if Path("/proc/self/stat").exists() else ():
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, parent = (process / "stat").read_text().rpartition(")")[2].split()[:2]
            if state not in "Tt" or int(parent) != os.getppid():
                continue
            rank = dict(
                pair.split(b"=", 1) for pair in (process / "environ").read_bytes().split(b"\0") if b"=" in pair
            )[b"RANK"]
            mark_stopped(directory, int(rank))
            os.kill(int(process.name), signal.SIGKILL)
            ended.append(int(process.name))
    return ended


def compare_collectives_after_a_hang() -> bool:
    """Have torch compare each collective among its ranks before it runs, in a retry (torchrun's ``max_restarts``, an executor's
    ``retries``) of a run that hung; returns whether it will. Where the ranks disagreed, the retry ends with an error that names
    what each of them called, with shapes. Costs one more message per collective."""
    directory = os.environ.get(FAULT_DIR_VARIABLE)
    if directory is None or here().restarts == 0 or "TORCH_DISTRIBUTED_DEBUG" in os.environ:
        return False
    if not any(path.stat().st_size for path in Path(directory).glob("rank-*.stacks")):
        return False
    import torch

    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    torch.distributed.set_debug_level_from_env()  # pyright: ignore[reportPrivateImportUsage]
    return True
