# SPDX-License-Identifier: Apache-2.0
"""Background saves one after the other, by the thousand, while the processes that write them are stopped and killed.

A thread of each rank disturbs some of its own writers, at a random moment of their short lives; another keeps an interpreter
lock busy. Every checkpoint must come to be, whole, and no process, descriptor or file may be left in the end.
"""

import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

SHARE_DISTURBED = 0.1


def loop(folder: str, count: int, seed: int) -> dict[str, Any]:
    """``count`` saves on every rank; what happened, as rank 0 saw it."""
    import torch

    from nemo2.checkpoint import background
    from nemo2.checkpoint.directory import changed, problems
    from support import small_runs

    background.SILENCE_SECONDS = 1.5
    rank, chance = torch.distributed.get_rank(), random.Random(seed + torch.distributed.get_rank())
    disturbed: list[str] = []
    told: list[str] = []
    background._tell = told.extend
    started_process = background._Process.__init__

    def started(self: Any, *arguments: Any) -> None:
        started_process(self, *arguments)
        if chance.random() < SHARE_DISTURBED:
            number = chance.choice((signal.SIGSTOP, signal.SIGKILL))
            delay = chance.random() * 0.08
            threading.Thread(target=_disturb, args=(self._process, number, delay, disturbed), daemon=True).start()

    background._Process.__init__ = started
    small_runs.quiet()
    trainer = small_runs.build_trainer(max_steps=1, ckpt_async_save=True, tensor_model_parallel_size=2)
    trainer.fit(small_runs.build_llama(), small_runs.TokenData())
    io: Any = trainer.strategy.checkpoint_io
    at_first, began, longest, bad = len(os.listdir("/proc/self/fd")), time.monotonic(), 0.0, []
    for number in range(count):
        before = time.monotonic()
        trainer.save_checkpoint(Path(folder) / f"step={number}")
        io.maybe_finalize_save_checkpoint()
        longest = max(longest, time.monotonic() - before)
        if rank == 0:
            bad += _checked(Path(folder), number - 10, problems, changed)
    io.maybe_finalize_save_checkpoint(blocking=True)
    torch.distributed.barrier()
    if rank == 0:
        for number in range(count - 10, count):
            bad += _checked(Path(folder), number, problems, changed)
    while background.Image._spare:
        background.Image.take().give_back(keep=0)
    return {
        "seconds": time.monotonic() - began,
        "longest": longest,
        "bad": bad,
        "told": told,
        "disturbed": disturbed,
        "descriptors": len(os.listdir("/proc/self/fd")) - at_first,
        "left": sorted(path.name for path in Path(folder).iterdir()) if rank == 0 else [],
    }


def _checked(folder: Path, number: int, problems: Any, changed: Any) -> list[str]:
    """Problems of a checkpoint that must be there by now; it is deleted."""
    path = folder / f"step={number}"
    if number < 0:
        return []
    found = problems(path) or changed(path)
    shutil.rmtree(path, ignore_errors=True)
    return [f"{path.name}: {'; '.join(found)}"] if found else []


def _disturb(process: Any, number: int, delay: float, disturbed: list[str]) -> None:
    time.sleep(delay)
    if process.poll() is None:
        os.kill(process.pid, number)
        disturbed.append(signal.Signals(number).name)
