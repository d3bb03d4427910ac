# SPDX-License-Identifier: Apache-2.0
"""Ends a run that makes no progress and writes down each rank's stacks."""

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

from nemo2.base.counts import is_number
from nemo2.base.errors import ConfigError
from nemo2.base.files import open_to_write
from nemo2.base.place import here
from nemo2.config.capture import configurable
from nemo2.training.run_dir.faults import FAULT_DIR_VARIABLE
from nemo2.training.run_dir.heartbeat import Heartbeat, mark_stopped, position_of
from nemo2.training.run_dir.kill_timer import KillTimer

DEFAULT_TIMEOUT_SECONDS = 1800.0
"""torch's default timeout of a collective."""
_MAX_SECONDS = 1e9
"""32 years. The timers of Python and of the kernel reject infinity."""
_GIL_SECONDS = 3.0
"""The time after the limit in which a Python thread must get a turn. Otherwise the process is ended from outside the
interpreter."""
_TICK_SECONDS = 1.0
_STOPPED_SECONDS = 2.0
"""The delay of a thread that sleeps for one tick after which the process counts as having been stopped."""


@configurable
class HangWatchdog(pl.Callback):
    """End this process, with its stacks written down, when no training step, validation batch or final save finishes
    within a timeout.

    ``llm.pretrain`` adds this callback with torch's 30 minutes, unless the trainer has its own.

    - Each rank watches itself in a thread. Behind the thread stands a kernel timer, which needs no interpreter's lock.
      It ends a process whose lock is never given back, 45 seconds after the timeout.
    - Ranks that wait for a hung rank end at the same time as the hung rank.
    - A process stopped by SIGSTOP can't end itself. A peer on its host ends it, because torchrun would wait half a
      minute longer.
    - If all ranks are stopped, by Ctrl-Z, ``scontrol suspend`` or a frozen container, each rank notices the pause and
      doesn't count it.
    - A debugger also counts as a hang. Raise the timeout to use one.

    Args:
        timeout_seconds: The longest time without progress. It must cover a step, a validation batch, a synchronous
            checkpoint save and, for the first step, compilation.
        first_timeout_seconds: The timeout until the end of the first step. None: ``timeout_seconds``.

    Raises:
        ConfigError: a timeout isn't positive.
    """

    def __init__(
        self, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS, first_timeout_seconds: Optional[float] = None
    ) -> None:
        for name, seconds in (("timeout_seconds", timeout_seconds), ("first_timeout_seconds", first_timeout_seconds)):
            if seconds is not None and not (is_number(seconds) and 0 < seconds <= _MAX_SECONDS):
                raise ConfigError(
                    f"HangWatchdog.{name}={seconds!r}: must be more than 0 and at most {_MAX_SECONDS:g} seconds."
                )
        self.timeout_seconds = timeout_seconds
        self.first_timeout_seconds = first_timeout_seconds
        self._file: Any = None
        self._heartbeat: Optional[Heartbeat] = None
        self._deadline = 0.0
        self._limit = timeout_seconds
        self._over = threading.Event()
        self._thread: Any = None
        self._rank = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        launched = os.environ.get(FAULT_DIR_VARIABLE)
        directory = launched or trainer.log_dir or trainer.default_root_dir
        Path(directory).mkdir(parents=True, exist_ok=True)
        self._rank = trainer.global_rank
        self._file = open(Path(directory, f"rank-{self._rank}.stacks"), "w", opener=open_to_write)  # noqa: SIM115  (threads write to it)
        # On the local disk, so that ranks don't write to a shared file system after each step.
        self._heartbeat = Heartbeat(directory, self._rank) if launched and trainer.num_nodes == 1 else None
        self._set_limit(self.first_timeout_seconds or self.timeout_seconds)
        self._progress(trainer, "at the start of training")
        self._over.clear()
        timer = KillTimer(self._file)
        timer.set(self._limit + _GIL_SECONDS)  # not by the thread: the lock may never come to it
        arguments = (directory, self._file, timer)
        self._thread = threading.Thread(target=self._watch, args=arguments, daemon=True, name="hang")
        self._thread.start()

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self._set_limit(self.timeout_seconds)
        self._progress(trainer)

    def on_validation_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self._progress(trainer, "in validation")

    def on_train_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self._progress(trainer, "at the end of training")  # the last save follows

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop()

    def _set_limit(self, seconds: float) -> None:
        """Write the limit at the head of the file of stacks, where the kernel's timer can't write it."""
        if self._file is None or (self._limit == seconds and self._file.tell()):
            return
        self._limit = seconds
        self._file.seek(0)
        self._file.truncate()
        self._file.write(f"Timeout ({timedelta(seconds=seconds)})!\n")
        self._file.flush()

    def _progress(self, trainer: pl.Trainer, phase: str = "") -> None:
        if self._file is None:
            return
        self._deadline = time.monotonic() + self._limit
        if self._heartbeat is not None:
            self._heartbeat.beat(trainer.global_step, phase)

    def _stop(self) -> None:
        file: Optional[Any] = self._file
        if file is None:
            return
        self._over.set()
        self._thread.join()
        self._file = None
        file.close()
        with contextlib.suppress(FileNotFoundError):  # the run's folder may have been removed
            os.unlink(file.name)
        if self._heartbeat is not None:
            self._heartbeat.end()

    def _watch(self, directory: str, file: Any, timer: KillTimer) -> None:
        before, worked = time.monotonic(), _working_seconds()
        while not self._over.wait(min(_TICK_SECONDS, max(0.0, self._deadline - before))):
            # One reading ends a tick and starts the next: a stop at any point is in one of them.
            now, working = time.monotonic(), _working_seconds()
            if now - before > _TICK_SECONDS + _STOPPED_SECONDS:
                self._did_not_run(now - before, stopped=working - worked < (now - before) / 2)
            elif now >= self._deadline:
                self._end(directory, file)
            timer.set(max(0.0, self._deadline - now) + _GIL_SECONDS)
            before, worked = now, working
        timer.end()

    def _did_not_run(self, seconds: float, *, stopped: bool) -> None:
        """Don't count ``seconds`` in which the watching thread didn't run. ``stopped``: the process was neither running
        nor waiting for a processor, as on a busy machine."""
        self._deadline += seconds
        if not stopped:
            return
        print(
            f"rank {self._rank} didn't run for {seconds:.0f} s, because its process or its machine was stopped. "
            "The watchdog doesn't count this time.",
            file=sys.stderr,
            flush=True,
        )

    def _end(self, directory: str, file: Any) -> None:
        # This thread has the interpreter's lock, so no other thread's frames change while they are read.
        faulthandler.dump_traceback(file=file)
        with contextlib.suppress(OSError):
            where = position_of(Path(file.name).read_text(encoding="utf-8", errors="replace"))
            print(
                f"error: rank {self._rank}: no step ended within {timedelta(seconds=self._limit)} (h:mm:ss). "
                f"Last position: {where}.",
                file=sys.stderr,
                flush=True,
            )
        end_stopped_siblings(directory)
        os._exit(1)


def _working_seconds() -> float:
    """The seconds in which this process has run on a processor, and in which its main thread and this thread have waited
    for one. It stands still while the process is stopped."""
    waited = 0
    for thread in (os.getpid(), threading.get_native_id()):
        with contextlib.suppress(OSError, ValueError, IndexError):  # not Linux
            waited += int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1])
    return time.process_time() + waited / 1e9


def end_stopped_siblings(directory: str) -> None:
    """Kill the stopped ranks of this rank's torchrun.

    Stopped ranks can't end themselves, and torchrun gives each of them half a minute.
    """
    if here().launcher != "torchrun":
        return
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


def compare_collectives_after_a_hang() -> bool:
    """Let torch compare each collective among its ranks before it runs, in a retry of a run that hung. Returns whether
    it will.

    A retry comes from torchrun's ``max_restarts`` or an executor's ``retries``. If the ranks disagreed, the retry fails
    with an error that names each rank's call and its shapes. This costs one more message per collective.
    """
    directory = os.environ.get(FAULT_DIR_VARIABLE)
    if directory is None or here().restarts == 0 or "TORCH_DISTRIBUTED_DEBUG" in os.environ:
        return False
    from nemo2.training.run_dir.hang_diagnosis import read_stacks

    if not read_stacks(Path(directory)):
        return False
    import torch

    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    torch.distributed.set_debug_level_from_env()  # pyright: ignore[reportPrivateImportUsage]
    return True
