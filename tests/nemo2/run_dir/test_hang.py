# SPDX-License-Identifier: Apache-2.0
"""A rank that makes no progress ends, and says where it was."""

import os
import time
import types
from pathlib import Path
from typing import Any

import pytest

from nemo2.errors import ConfigError
from nemo2.run_dir.faults import read_faults
from nemo2.run_dir.hang import HangWatchdog


def watched(directory: Path, action: Any, timeout_seconds: float = 0.4) -> int:
    """Run ``action(watchdog, trainer)`` in a process that is watched; its exit code."""
    pid = os.fork()
    if pid == 0:
        trainer: Any = types.SimpleNamespace(global_rank=3, log_dir=str(directory), default_root_dir="/nowhere")
        watchdog = HangWatchdog(timeout_seconds)
        watchdog.on_train_start(trainer, None)  # pyright: ignore[reportArgumentType]
        action(watchdog, trainer)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def stuck_in_here(*args: Any) -> None:
    time.sleep(20)


def busy_in_here(*args: Any) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        pass


@pytest.mark.parametrize("action", [stuck_in_here, busy_in_here])
def test_a_hung_rank_ends_within_its_timeout_and_its_stacks_name_the_place(tmp_path, monkeypatch, action):
    monkeypatch.delenv("NEMO2_FAULT_DIR", raising=False)
    started = time.monotonic()
    assert watched(tmp_path, action) == 1
    assert time.monotonic() - started < 10
    [fault] = read_faults(tmp_path)
    assert (fault.kind, fault.rank, fault.explained) == ("Hang", 3, True)
    assert action.__name__ in fault.traceback
    assert "no step ended within 0:00:00.4" in fault.message
    assert f'rank-3 in File "{__file__}"' in fault.message


def test_progress_keeps_it_alive_and_the_end_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.delenv("NEMO2_FAULT_DIR", raising=False)

    def steps(watchdog: HangWatchdog, trainer: Any) -> None:
        for _ in range(12):
            time.sleep(0.1)
            watchdog.on_train_batch_end()
        watchdog.on_train_end()
        watchdog.teardown(trainer, None, "fit")  # pyright: ignore[reportArgumentType]
        time.sleep(0.8)

    assert watched(tmp_path, steps, 0.6) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_last_save_that_hangs_is_a_hang(tmp_path, monkeypatch):
    monkeypatch.delenv("NEMO2_FAULT_DIR", raising=False)

    def save(watchdog: HangWatchdog, trainer: Any) -> None:
        watchdog.on_train_end()
        stuck_in_here()

    assert watched(tmp_path, save) == 1
    assert "stuck_in_here" in read_faults(tmp_path)[0].traceback


def test_a_timeout_that_cannot_work_is_refused():
    with pytest.raises(ConfigError, match="HangWatchdog.timeout_seconds=0"):
        HangWatchdog(0)
