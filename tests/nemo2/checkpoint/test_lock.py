# SPDX-License-Identifier: Apache-2.0
"""Two runs never write into one directory, and a lock dies with the process that held it."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo2.base.errors import CheckpointError, RuntimeFault
from nemo2.base.place import LAUNCH_VARIABLE
from nemo2.checkpoint.lock import DirectoryLock, holds


def holder(directory: Path) -> int:
    """A process that holds the lock until it is killed; its id."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        DirectoryLock(directory).acquire()
        os.write(writer, b"x")
        time.sleep(60)
        os._exit(0)
    os.read(reader, 1)
    return pid


@contextlib.contextmanager
def held(directory: Path) -> Iterator[int]:
    pid = holder(directory)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_second_process_is_refused_and_told_who_holds_it(tmp_path):
    with held(tmp_path) as pid:
        words = rf"Another run is writing to {tmp_path}: process {pid} on .*log\.name"
        with pytest.raises(CheckpointError, match=words):
            DirectoryLock(tmp_path, wait_seconds=0.0).acquire()
        assert not holds(tmp_path)


def test_an_earlier_start_of_the_same_launch_is_waited_for_and_then_no_reason_to_give_up(tmp_path, monkeypatch):
    monkeypatch.setenv(LAUNCH_VARIABLE, "/jobs/one/run_dir")
    with held(tmp_path) as pid:
        with pytest.raises(RuntimeFault, match=rf"earlier start of this run.*process {pid} on "):
            DirectoryLock(tmp_path, wait_seconds=0.0, earlier_start_seconds=0.3).acquire()
        monkeypatch.setenv(LAUNCH_VARIABLE, "/jobs/two/run_dir")
        with pytest.raises(CheckpointError, match="Another run"):
            DirectoryLock(tmp_path, wait_seconds=0.0).acquire()


def test_the_lock_of_a_killed_process_is_free_although_its_file_is_there(tmp_path):
    with held(tmp_path) as pid:
        pass
    assert str(pid) in (tmp_path / ".lock").read_text()
    lock = DirectoryLock(tmp_path, wait_seconds=0.0).acquire()
    assert holds(tmp_path)
    assert str(os.getpid()) in (tmp_path / ".lock").read_text()
    lock.release()
    assert not holds(tmp_path)


def test_a_forked_child_of_the_holder_does_not_keep_it(tmp_path):
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        DirectoryLock(tmp_path).acquire()
        child = os.fork()
        if child == 0:
            time.sleep(20)
            os._exit(0)
        os.write(writer, str(child).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    child = int(os.read(reader, 32))
    try:
        DirectoryLock(tmp_path, wait_seconds=0.0).acquire().release()
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_process_may_take_its_own_lock_twice(tmp_path):
    first = DirectoryLock(tmp_path).acquire()
    second = DirectoryLock(tmp_path / ".." / tmp_path.name).acquire()
    second.release()
    assert holds(tmp_path)
    first.release()
    assert not holds(tmp_path)


def test_a_waiting_run_gets_the_lock_of_one_that_is_just_ending(tmp_path):
    pid = holder(tmp_path)
    ender = os.fork()
    if ender == 0:
        time.sleep(0.3)
        os.kill(pid, signal.SIGKILL)
        os._exit(0)
    lock = DirectoryLock(tmp_path, wait_seconds=20.0).acquire()
    os.waitpid(pid, 0)
    os.waitpid(ender, 0)
    lock.release()
