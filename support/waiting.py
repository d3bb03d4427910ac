# SPDX-License-Identifier: Apache-2.0
"""Waiting for what other processes do, with a limit."""

import time
from collections.abc import Callable
from pathlib import Path


def wait_until(there: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < end, f"it didn't happen within {seconds:g} s"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Whether a process does anything: not after its end, whether or not its parent has asked how it ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_for_end(*pids: int) -> None:
    wait_until(lambda: not any(map(is_running, pids)))
