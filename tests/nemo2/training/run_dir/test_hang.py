# SPDX-License-Identifier: Apache-2.0
"""A rank that makes no progress ends, and says where it was."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest

from nemo2.base.errors import ConfigError
from nemo2.training.run_dir.faults import read_faults
from nemo2.training.run_dir.hang import HangWatchdog, compare_collectives_after_a_hang
from nemo2.training.run_dir.heartbeat import Heartbeat, position_of
from nemo2.training.run_dir.kill_timer import KillTimer


def watched(directory: Path, action: Any, timeout_seconds: float = 0.4) -> int:
    """Run ``action(watchdog, trainer)`` in a process that is watched; its exit code."""
    pid = os.fork()
    if pid == 0:
        try:  # whatever is raised, this process is no second pytest
            trainer: Any = types.SimpleNamespace(
                global_rank=3, global_step=7, num_nodes=1, log_dir=str(directory), default_root_dir="/nowhere"
            )
            watchdog = HangWatchdog(timeout_seconds)
            watchdog.on_train_start(trainer, None)  # pyright: ignore[reportArgumentType]
            action(watchdog, trainer)
            os._exit(0)
        finally:
            os._exit(99)
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except BaseException:  # a test that is out of time leaves no process that is busy for ever
        os.kill(pid, signal.SIGKILL)
        raise


def stuck_in_here(*args: Any) -> None:
    time.sleep(20)


def busy_in_here(*args: Any) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        pass


@pytest.mark.parametrize("action", [stuck_in_here, busy_in_here])
def test_a_hung_rank_ends_within_its_timeout_and_its_stacks_name_the_place(tmp_path, monkeypatch, action):
    monkeypatch.delenv("NEMO2_FAULT_DIR", raising=False)
    assert watched(tmp_path, action) == 1
    [fault] = read_faults(tmp_path)
    assert (fault.kind, fault.rank, fault.explained) == ("Hang", 3, True)
    assert action.__name__ in fault.traceback
    assert "no step ended within 0:00:00.4" in fault.message
    assert f'rank 3 at File "{__file__}"' in fault.message


def test_progress_keeps_it_alive_and_the_end_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.delenv("NEMO2_FAULT_DIR", raising=False)

    def steps(watchdog: HangWatchdog, trainer: Any) -> None:
        for _ in range(12):
            time.sleep(0.1)
            watchdog.on_train_batch_end(trainer)
        watchdog.on_train_end(trainer)
        watchdog.teardown(trainer, None, "fit")  # pyright: ignore[reportArgumentType]
        time.sleep(0.8)

    assert watched(tmp_path, steps, 0.6) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_last_save_that_hangs_is_a_hang(tmp_path, monkeypatch):
    monkeypatch.delenv("NEMO2_FAULT_DIR", raising=False)

    def save(watchdog: HangWatchdog, trainer: Any) -> None:
        watchdog.on_train_end(trainer)
        stuck_in_here()

    assert watched(tmp_path, save) == 1
    assert "stuck_in_here" in read_faults(tmp_path)[0].traceback


@pytest.mark.parametrize("works", [True, False], ids=["busy", "stopped"])
def test_only_a_process_that_did_not_want_to_run_is_said_to_have_been_stopped(tmp_path, monkeypatch, capfd, works):
    """A thread that doesn't run for long on a busy machine: the process runs, or waits for a processor, all that time."""
    monkeypatch.delenv("NEMO2_FAULT_DIR", raising=False)
    monkeypatch.setattr("nemo2.training.run_dir.hang._TICK_SECONDS", 0.1)
    monkeypatch.setattr("nemo2.training.run_dir.hang._STOPPED_SECONDS", -1.0)  # each tick counts as late
    seconds: Any = time.monotonic if works else lambda: 0.0
    monkeypatch.setattr("nemo2.training.run_dir.hang._working_seconds", seconds)
    told = threading.Event()
    original = HangWatchdog._did_not_run

    def noted(self: HangWatchdog, seconds: float, **options: Any) -> None:
        original(self, seconds, **options)
        told.set()

    def wait(watchdog: HangWatchdog, trainer: Any) -> None:
        told.wait(30)
        watchdog.teardown(trainer, None, "fit")  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(HangWatchdog, "_did_not_run", noted)
    assert watched(tmp_path, wait, 60.0) == 0
    assert ("didn't run" in capfd.readouterr().err) is not works


def holding_the_lock(*args: Any) -> None:
    """A call in C that keeps the interpreter's lock for longer than the universe is old."""
    import re

    re.match("(a+)+$", "a" * 80 + "b")


def test_a_rank_that_never_gives_the_interpreter_back_is_ended_from_outside(tmp_path, monkeypatch):
    monkeypatch.delenv("NEMO2_FAULT_DIR", raising=False)
    monkeypatch.setattr("nemo2.training.run_dir.kill_timer._GRACE_CALL", "usleep")
    monkeypatch.setattr("nemo2.training.run_dir.kill_timer._BETWEEN_SECONDS", 0.1)
    monkeypatch.setattr("nemo2.training.run_dir.hang._GIL_SECONDS", 0.3)
    assert watched(tmp_path, holding_the_lock) < 0
    [fault] = read_faults(tmp_path)
    assert "holding_the_lock" in fault.traceback and "no step ended within" in fault.message


@pytest.mark.parametrize("hangs", [False, True], ids=["and goes on", "and hangs then"])
def test_a_stop_of_the_whole_run_doesnt_count(tmp_path, monkeypatch, hangs, capfd):
    """Ctrl-Z for longer than the limit and all that lies behind it; then fg."""
    monkeypatch.delenv("NEMO2_FAULT_DIR", raising=False)
    monkeypatch.setattr("nemo2.training.run_dir.hang._TICK_SECONDS", 0.1)
    monkeypatch.setattr("nemo2.training.run_dir.hang._STOPPED_SECONDS", 0.5)
    monkeypatch.setattr("nemo2.training.run_dir.hang._GIL_SECONDS", 0.3)
    seconds = 2.0

    def stopped_and_continued(watchdog: HangWatchdog, trainer: Any) -> None:
        watchdog.on_train_batch_end(trainer)
        subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(20 if hangs else 0.3)
        watchdog.teardown(trainer, None, "fit")  # pyright: ignore[reportArgumentType]

    started = time.monotonic()
    assert watched(tmp_path, stopped_and_continued, 1.0) == (1 if hangs else 0)
    took = time.monotonic() - started
    assert took >= seconds + 0.3
    assert "rank 3 didn't run for 2 s, because its process or its machine was stopped" in capfd.readouterr().err
    assert len(read_faults(tmp_path)) == hangs
    if hangs:
        assert took >= seconds + 0.9 and read_faults(tmp_path)[0].message.count("no step ended within") == 1


def test_a_process_that_continues_has_time_to_set_its_expired_kill_timer(tmp_path):
    pid = os.fork()
    if pid == 0:
        timer = KillTimer(open(tmp_path / "stacks", "w"))  # noqa: SIM115  (until the process ends)
        timer.set(0.1)
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.5)
        timer.end()
        time.sleep(0.1)
        os._exit(0)
    os.waitpid(pid, os.WUNTRACED)
    time.sleep(1.5)  # both signals are due
    os.kill(pid, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_it_ends_although_its_folder_was_removed(tmp_path, monkeypatch):
    monkeypatch.delenv("NEMO2_FAULT_DIR", raising=False)

    def remove(watchdog: HangWatchdog, trainer: Any) -> None:
        shutil.rmtree(tmp_path)
        watchdog.teardown(trainer, None, "fit")  # pyright: ignore[reportArgumentType]

    assert watched(tmp_path, remove, 30.0) == 0


@pytest.mark.parametrize("seconds", [0, math.nan, math.inf, "60"])
def test_a_timeout_that_cannot_work_is_refused(seconds: Any):
    with pytest.raises(ConfigError, match=f"HangWatchdog.timeout_seconds={seconds!r}"):
        HangWatchdog(seconds)


STACKS = """Timeout (0:00:25)!
Thread 0x00007f (most recent call first):
  File "/env/torch/_inductor/worker.py", line 5 in wait

Thread 0x00007e (most recent call first):
  File "/env/torch/distributed/distributed_c10d.py", line 3155 in {collective}
  File "/env/torch/distributed/c10d_logger.py", line 81 in wrapper
  File "/env/megatron/core/optimizer/clip_grads.py", line {line} in get_grad_norm
  File "/home/me/train.py", line 3 in <module>
"""


def stacks(directory: Path, rank: int, collective: str = "all_reduce", line: int = 120) -> None:
    (directory / f"rank-{rank}.stacks").write_text(STACKS.format(collective=collective, line=line))


def test_a_silent_rank_is_named_with_its_last_step_and_what_the_others_waited_in(tmp_path):
    for rank in (0, 1, 2):
        Heartbeat(tmp_path, rank).beat(4)
    (tmp_path / "rank-1.heartbeat").write_text(json.dumps({"time": time.time() - 25, "step": 4}))
    stacks(tmp_path, 0)
    stacks(tmp_path, 2)
    [fault] = read_faults(tmp_path)
    assert fault.rank == 1
    since = time.strftime("%H:%M:", time.localtime(time.time() - 25))
    assert f"rank 1 stopped reporting at {since}" in fault.message
    assert ", 25 s before the timeout, after step 4." in fault.message
    assert "No step ended within 0:00:25" in fault.message
    where = 'ranks 0, 2 in all_reduce, called at File "/env/megatron/core/optimizer/clip_grads.py", line 120 in get_grad_norm'
    assert f"Ranks that waited: {where}" in fault.message


def test_ranks_that_wait_in_different_collectives_are_told_apart(tmp_path):
    stacks(tmp_path, 0)
    stacks(tmp_path, 1, "broadcast", 7)
    [fault] = read_faults(tmp_path)
    assert "rank 0 in all_reduce, called at" in fault.message and "rank 1 in broadcast, called at" in fault.message
    assert "wait in different collectives" in fault.message and "TORCH_DISTRIBUTED_DEBUG=DETAIL" in fault.message
    stacks(tmp_path, 1)
    assert "different" not in read_faults(tmp_path)[0].message


def test_a_place_without_a_collective_is_the_innermost_frame():
    assert str(position_of("nothing")) == "at an unknown place"
    stack = 'Current thread 0x1 (most recent call first):\n  File "/home/me/train.py", line 3 in f\n'
    assert str(position_of(stack)) == 'at File "/home/me/train.py", line 3 in f'


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_a_stopped_rank_is_ended_by_a_peer_and_told(tmp_path, monkeypatch):
    """This process is the torchrun of both."""
    faults = tmp_path / "faults"
    faults.mkdir()
    monkeypatch.setenv("NEMO2_FAULT_DIR", str(faults))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("RANK", "3")
    stopped = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], env={**os.environ, "RANK": "1"}
    )  # fmt: skip
    stopped.send_signal(signal.SIGSTOP)
    Heartbeat(faults, 1).beat(4, "in validation")
    assert watched(tmp_path, stuck_in_here) == 1
    assert stopped.wait(5) == -signal.SIGKILL
    [fault] = read_faults(faults)
    assert fault.rank == 1 and "its process was stopped (SIGSTOP or a debugger)" in fault.message
    assert "after step 4, in validation, and" in fault.message
    assert f'rank 3 at File "{__file__}"' in fault.message


LIMIT_SECONDS = 4.0


def with_a_stopped_rank(directory: str) -> None:
    import lightning.pytorch as pl

    from nemo2.training.run_dir.preemption import PreemptionCallback
    from support import small_runs

    class Stop(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2 and trainer.global_rank == 1:
                (Path(directory) / "stopped").touch()
                os.kill(os.getpid(), signal.SIGSTOP)

    os.environ["NEMO2_FAULT_DIR"] = directory
    small_runs.fit(
        small_runs.build_llama(),
        max_steps=6,
        callbacks=[HangWatchdog(LIMIT_SECONDS), PreemptionCallback(), Stop()],
        tensor_model_parallel_size=2,
    )


def test_a_rank_that_is_stopped_in_a_step_is_told_in_time_with_the_collective_that_the_other_waited_in(
    run_on_ranks, tmp_path
):
    """Two real ranks. The time is the stated one and ten seconds; how late a busy machine lets this process see it is its own."""
    from support.ranks import RankFailed

    with pytest.raises(RankFailed):
        run_on_ranks(with_a_stopped_rank, 2, str(tmp_path), timeout=120.0, quiet=True)
    [fault] = read_faults(tmp_path)
    assert "rank 1 stopped reporting at" in fault.message and "after step 2" in fault.message
    assert re.search(
        r"Ranks that waited: rank 0 in \w*(all_reduce|broadcast|all_gather)\w*, called at File", fault.message
    )
    ended = (tmp_path / "rank-0.stacks").stat().st_mtime
    assert ended - (tmp_path / "stopped").stat().st_mtime < LIMIT_SECONDS + 10


def in_a_retry(faults: str) -> str:
    import torch

    os.environ |= {"NEMO2_FAULT_DIR": faults, "TORCHELASTIC_RESTART_COUNT": "1"}
    assert compare_collectives_after_a_hang()
    torch.distributed.init_process_group("gloo")
    with pytest.raises(RuntimeError) as caught:
        if torch.distributed.get_rank() == 0:
            torch.distributed.all_reduce(torch.ones(3))
        else:
            torch.distributed.broadcast(torch.ones(2), src=1)
    return str(caught.value)


def test_a_retry_after_a_hang_says_which_rank_calls_what(run_on_ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("NEMO2_FAULT_DIR", str(tmp_path))
    assert not compare_collectives_after_a_hang()  # the attempt before ended otherwise
    stacks(tmp_path, 0)
    for said in run_on_ranks(in_a_retry, 2, str(tmp_path), init_process_group=False, timeout=170.0):
        assert "ALLREDUCE" in said and "BROADCAST" in said and "Rank 0" in said, said
