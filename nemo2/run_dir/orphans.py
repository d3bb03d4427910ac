# SPDX-License-Identifier: Apache-2.0
"""Ranks end with those that started them, so that nobody trains on, unseen, with a lock that the next run needs.

A launcher or a torchrun that is killed can't end its ranks. Each rank of a launched run looks once a second whether both are
still there. If not, it does what SIGTERM would have it do, which is to save and stop, and ends in any case soon after.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Optional

from nemo2.place import here

LAUNCHER_VARIABLE = "NEMO2_LAUNCHER"
"""The launcher of a run on this machine, as `name_of_this_process` says; set by the launcher."""

GRACE_SECONDS = 60.0
"""Seconds that a rank without a launcher has for its last save."""
_LOOK_SECONDS = 1.0
_started = False


def name_of_this_process() -> str:
    """Its id and the time of its start, by which it is told from a later process of that id."""
    return f"{os.getpid()} {_start_time(os.getpid())}"


def end_with_parents() -> bool:
    """Have this process end with torchrun and with the launcher, if these started it; returns whether it is watched.

    Does nothing in a process of which torchrun's variables don't say that it is a rank. Idempotent.
    """
    global _started
    if here().launcher != "torchrun":
        return False
    if not _started:
        _started = True
        parent, launcher = os.getppid(), os.environ.get(LAUNCHER_VARIABLE)
        # torchrun may have ended while this process was being imported.
        orphaned = _is_init(parent)
        threading.Thread(
            target=_watch, args=(lambda: orphaned or _lost(parent, launcher),), daemon=True, name="parents"
        ).start()
    return True


def _watch(lost: Callable[[], bool]) -> None:
    while not lost():
        time.sleep(_LOOK_SECONDS)
    # To the process, as anybody else would: its main thread answers.
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def _lost(parent: int, launcher: Optional[str]) -> bool:
    return os.getppid() != parent or (launcher is not None and not lives(launcher))


def lives(name: str) -> bool:
    """Whether the process of this name, as `name_of_this_process` gave it, is still there."""
    pid, _, started = name.partition(" ")
    try:
        os.kill(int(pid), 0)
    except PermissionError:
        return True
    except (ProcessLookupError, ValueError):
        return False
    return not started or started == _start_time(int(pid))


def _start_time(pid: int) -> str:
    """In clock ticks since the machine was; "" where that isn't known, or for a process that has ended and is waited for."""
    try:
        # After the name, which may hold anything, in parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        return ""


def _is_init(pid: int) -> bool:
    """Whether it is the process that orphans are given to, rather than a torchrun that is a container's first."""
    try:
        return pid == 1 and b"torch" not in Path("/proc/1/cmdline").read_bytes()
    except OSError:
        return False
