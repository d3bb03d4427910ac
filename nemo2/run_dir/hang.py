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
from nemo2.run_dir.last_resort import LastResort
from nemo2.run_dir.stalls import LifeSign, mark_stopped, place_of

DEFAULT_TIMEOUT_SECONDS = 1800.0
"""The default of torch's own time limit of a collective."""
_GIL_SECONDS = 3.0
"""A process in which no thread of Python's gets a turn for so long after the limit is ended from outside the interpreter."""
_TICK_SECONDS = 1.0
_STOPPED_SECONDS = 2.0
"""A thread that sleeps for a tick and wakes so much later was in a process that didn't run."""


@configurable
class HangWatchdog(pl.Callback):
    """Ends this process, its stacks written down, when neither a training step nor a validation batch ends for a while, nor the
    last save.

    ``llm.pretrain`` adds one with torch's 30 minutes unless the trainer has its own. Each rank watches itself, in a thread, and
    behind that Python's `faulthandler` and a timer of the kernel's, which need neither the interpreter's lock nor the rank's
    cooperation; ranks that wait for a hung one end at the same time as it does. A stopped process (SIGSTOP) can't end itself: a
    peer on its machine does, for torchrun would wait half a minute more. Where all ranks are stopped, by Ctrl-Z, ``scontrol
    suspend`` or a frozen container, each sees that it didn't run, and that time doesn't count. A debugger is a hang, too: raise
    the timeout for that. Costs a new thread per step, some 50 us.

    Args:
        timeout_seconds: Without progress. It has to cover a step, a validation batch, a checkpoint that isn't saved in the
            background and, for the first step, compilation.
        first_timeout_seconds: Until the end of the first step. None: the same.

    Raises:
        ConfigError: a timeout isn't positive.
    """

    def __init__(
        self, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS, first_timeout_seconds: Optional[float] = None
    ) -> None:
        for name, seconds in (("timeout_seconds", timeout_seconds), ("first_timeout_seconds", first_timeout_seconds)):
            if seconds is not None and seconds <= 0:
                raise ConfigError(f"HangWatchdog.{name}={seconds}: must be more than 0 seconds.")
        self.timeout_seconds = timeout_seconds
        self.first_timeout_seconds = first_timeout_seconds
        self._file: Any = None
        self._life: Optional[LifeSign] = None
        self._deadline = 0.0
        self._limit = timeout_seconds
        self._last_resort: Optional[LastResort] = None
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
        self._last_resort = LastResort()
        self._limit = self.first_timeout_seconds or self.timeout_seconds
        self._progress(trainer, "at the start of training")
        self._over.clear()
        threading.Thread(target=self._watch, args=(directory,), daemon=True, name="hang").start()

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self._limit = self.timeout_seconds
        self._progress(trainer)

    def on_validation_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self._progress(trainer, "in validation")

    def on_train_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self._progress(trainer, "at the end of training")  # the last save is still to come

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop()

    def _progress(self, trainer: pl.Trainer, phase: str = "") -> None:
        if self._file is None:
            return
        self._deadline = time.monotonic() + self._limit
        self._set_outer(self._limit)
        if self._life is not None:
            self._life.give(trainer.global_step, phase)

    def _set_outer(self, seconds: float) -> None:
        """What acts without the interpreter: faulthandler writes the stacks, the kernel's timer ends the process."""
        timer: Any = self._last_resort
        faulthandler.dump_traceback_later(seconds + _GIL_SECONDS, exit=not timer.there, file=self._file)
        if timer.there:
            timer.set(seconds + _GIL_SECONDS)

    def _stop(self) -> None:
        file: Optional[Any] = self._file
        if file is None:
            return
        faulthandler.cancel_dump_traceback_later()
        if self._last_resort is not None and self._last_resort.there:
            self._last_resort.end()
        self._over.set()
        self._file = None
        file.close()
        with contextlib.suppress(FileNotFoundError):  # somebody may have removed the run's folder
            if os.path.getsize(file.name) == 0:
                os.unlink(file.name)
        if self._life is not None:
            self._life.end()

    def _watch(self, directory: str) -> None:
        asleep = time.monotonic()
        while not self._over.wait(min(_TICK_SECONDS, max(0.0, self._deadline - asleep))):
            now = time.monotonic()
            if now - asleep > _TICK_SECONDS + _STOPPED_SECONDS:
                self._did_not_run(now - asleep)
            elif now >= self._deadline:
                self._end(directory)
            asleep = time.monotonic()

    def _did_not_run(self, seconds: float) -> None:
        """Count ``seconds`` of this process' not for it, and forget the stacks that faulthandler wrote when they were over."""
        file = self._file
        if file is None:
            return
        self._deadline += seconds
        self._set_outer(max(0.0, self._deadline - time.monotonic()))
        os.truncate(file.fileno(), 0)
        print(
            f"rank {self._rank} didn't run for {seconds:.0f} s (stopped, or its machine was): the watchdog doesn't count them.",
            file=sys.stderr,
            flush=True,
        )

    def _end(self, directory: str) -> None:
        file = self._file
        if file is None:
            return
        limit = timedelta(seconds=self._limit)
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
