# SPDX-License-Identifier: Apache-2.0
"""Faults: functions to be called on every rank before a run, and damage done between runs."""

import functools
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Fault = Callable[[], None]


def rank() -> int:
    return int(os.environ["RANK"])


def die(number: int = signal.SIGKILL) -> None:
    os.kill(os.getpid(), number)
    time.sleep(30)


def before(owner: Any, name: str, action: Callable[..., None], *, call: int = 1) -> None:
    """Run ``action`` directly before the n-th call of a function."""
    original = getattr(owner, name)
    left = [call]

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            action()
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


def at_step(step: int, victim: int, action: Callable[[], None]) -> Fault:
    """Act on one rank inside a step (counted from 1 within this run): after the backward pass and before the update."""

    def fault() -> None:
        from nemo2.mcore.optim.megatron import MegatronOptimizer

        if rank() == victim:
            before(MegatronOptimizer, "step", action, call=step)

    return fault


def in_validation(victim: int) -> Fault:
    def fault() -> None:
        from nemo2.training.strategy import MegatronStrategy

        if rank() == victim:
            before(MegatronStrategy, "validation_step", die, call=3)

    return fault


def in_save(phase: str, victim: int, save: int = 2) -> Fault:
    """``victim`` is killed in the n-th save. Phases that only rank 0 goes through happen there."""

    def fault() -> None:
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing import serialization

        from nemo2.checkpoint import directory, io, model_checkpoint, writing

        places: dict[str, tuple[Any, str]] = {
            "before anything is written": (dist_checkpointing, "save"),
            "before the shards": (writing, "write_files"),
            "after the shards": (io, "_written"),
            "before metadata.json": (serialization, "save_config"),
            "before the manifest": (io, "publish"),
            "before the rename": (directory, "_fsync"),
            "after the rename": (model_checkpoint.ModelCheckpoint, "_published"),
            "while old ones are deleted": (model_checkpoint, "remove"),
        }
        owner, name = places[phase]
        only_zero = {"before metadata.json", "before the manifest", "before the rename", "while old ones are deleted"}
        if rank() == (0 if phase in only_zero else victim):
            before(owner, name, die, call=1 if phase == "while old ones are deleted" else save)

    return fault


def after_some_shards(victim: int, *, save: int = 2) -> Fault:
    """Kill the rank ``victim`` when it has written one of its two files."""

    def fault() -> None:
        from nemo2.checkpoint import writing

        files = [0]
        original = writing.WatchedSaveStrategy._write

        def write(self: Any, bucket: Any) -> Any:
            result = original(self, bucket)
            if "/.unfinished-" in bucket[0] and f"step={save * 3}" in bucket[0]:
                files[0] += 1
                if files[0] == 1:
                    die()
            return result

        if rank() == victim:
            writing.WatchedSaveStrategy._write = write

    return fault


def writers(disturb: Callable[[int, int], None], victim: int, *, silence_seconds: float = 2.0) -> Fault:
    """``disturb(pid, number)`` is called with each process that writes ``victim``'s background saves, right after its start."""

    def fault() -> None:
        from nemo2.checkpoint import background

        background.SILENCE_SECONDS = silence_seconds
        original, number = background._Process.__init__, [0]

        def init(self: Any, *arguments: Any) -> None:
            original(self, *arguments)
            number[0] += 1
            if rank() == victim:
                disturb(self._process.pid, number[0])

        background._Process.__init__ = init

    return fault


def fails_after_a_save(victim: int) -> Fault:
    """``victim`` raises in step 5, five seconds after the background save before it, which no rank has published."""

    def fault() -> None:
        from nemo2.checkpoint import background

        original = background.Saves.finish
        background.Saves.finish = lambda self, *, blocking: blocking and original(self, blocking=blocking)
        at_step(5, victim, fail)()

    def fail() -> None:
        time.sleep(5.0)
        raise RuntimeError("the step failed")

    return fault


# ------------------------------------------------------------------------------------------------------ between runs


def shards(checkpoint: Path) -> list[Path]:
    return sorted((checkpoint / "weights").glob("*.distcp"), key=lambda path: -path.stat().st_size)


def truncate(checkpoint: Path) -> None:
    os.truncate(shards(checkpoint)[0], shards(checkpoint)[0].stat().st_size // 2)


def flip_a_bit(checkpoint: Path) -> None:
    with open(shards(checkpoint)[0], "r+b") as file:
        file.seek(shards(checkpoint)[0].stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x10]))


def lose_a_shard(checkpoint: Path) -> None:
    shards(checkpoint)[0].unlink()


def lose(name: str) -> Callable[[Path], None]:
    def damage(checkpoint: Path) -> None:
        path = checkpoint / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


def tear_the_manifest(checkpoint: Path) -> None:
    file = checkpoint / "manifest.json"
    file.write_bytes(file.read_bytes()[:40])
