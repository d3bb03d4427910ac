# SPDX-License-Identifier: Apache-2.0
"""Ends ranks together with their launcher, so that no orphaned rank keeps training and holding a lock that the next run
needs.

A launcher or a torchrun that is killed can't end its ranks. Each rank of a launched run checks once a second whether
both still exist. If one of them is gone, the rank sends itself SIGTERM, which saves and stops. After `GRACE_SECONDS` it
kills itself.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Optional

from nemo2.base.place import here

LAUNCHER_VARIABLE = "NEMO2_LAUNCHER"
"""The variable with the launcher of a run on this machine, in the form of `process_identity`. The launcher sets
it."""

GRACE_SECONDS = 60.0
"""The seconds that a rank without a launcher has for its last save."""
_POLL_SECONDS = 1.0
_started = False


def process_identity() -> str:
    """The process's id and start time, which distinguish it from a later process with the same id."""
    return f"{os.getpid()} {_start_time(os.getpid())}"


def end_with_parents() -> bool:
    """Let this process end with torchrun and with the launcher, if these started it. Returns whether it is watched.

    Does nothing in a process that is no rank according to torchrun's variables. Idempotent.
    """
    global _started
    if here().launcher != "torchrun":
        return False
    if not _started:
        _started = True
        parent, launcher = os.getppid(), os.environ.get(LAUNCHER_VARIABLE)
        # torchrun may have ended during this process's imports.
        orphaned = _is_init(parent)
        threading.Thread(
            target=_watch, args=(lambda: orphaned or _lost(parent, launcher),), daemon=True, name="parents"
        ).start()
    return True


def _watch(lost: Callable[[], bool]) -> None:
    while not lost():
        time.sleep(_POLL_SECONDS)
    # Sent to the process like any external signal: its main thread handles it.
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def _lost(parent: int, launcher: Optional[str]) -> bool:
    return os.getppid() != parent or (launcher is not None and not is_running(launcher))


def is_running(name: str) -> bool:
    """Whether the process of this name, from `process_identity`, still exists."""
    pid, _, started = name.partition(" ")
    try:
        os.kill(int(pid), 0)
    except PermissionError:
        return True
    except (ProcessLookupError, ValueError):
        return False
    return not started or started == _start_time(int(pid))


def _start_time(pid: int) -> str:
    """The start time in clock ticks since boot. "": unknown, or the process is a zombie."""
    try:
        # After the name, which is in parentheses and may contain anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        return ""


def _is_init(pid: int) -> bool:
    """Whether ``pid`` is the process that adopts orphans. False for a torchrun that is a container's first process."""
    try:
        return pid == 1 and b"torch" not in Path("/proc/1/cmdline").read_bytes()
    except OSError:
        return False
