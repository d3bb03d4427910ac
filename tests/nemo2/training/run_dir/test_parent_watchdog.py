# SPDX-License-Identifier: Apache-2.0
"""A rank doesn't outlive those that started it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nemo2.training.run_dir import parent_watchdog
from support.waiting import wait_for_end

RANK = f"""
import os, signal, sys, time
sys.path[:0] = {sys.path!r}
from nemo2.training.run_dir import parent_watchdog
parent_watchdog._POLL_SECONDS, parent_watchdog.GRACE_SECONDS = 0.05, 0.5
if sys.argv[1] == "saves":
    def save(*_):
        open(sys.argv[2], "w").write("saved")
        sys.exit(143)
    signal.signal(signal.SIGTERM, save)
elif sys.argv[1] == "hangs":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
parent = os.getppid()
print(os.getpid(), flush=True)
if "LATE" in os.environ:
    while os.getppid() == parent:
        time.sleep(0.01)
    parent_watchdog._is_init = lambda pid: pid == os.getppid()  # a container's first process may be anything
parent_watchdog.end_with_parents()
print("watched", flush=True)
time.sleep(60)
"""
TORCHRUN = """
import subprocess, sys
sys.exit(subprocess.run([sys.executable, "-c", *sys.argv[1:]]).returncode)
"""


def started(how: str, file: Path, **variables: str) -> tuple[subprocess.Popen, int]:
    """A stand-in for torchrun, and its rank's id."""
    environment = {**os.environ, "RANK": "0", "TORCHELASTIC_RUN_ID": "x", **variables}
    line = [sys.executable, "-c", TORCHRUN, RANK, how, str(file)]
    torchrun = subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, text=True)
    assert torchrun.stdout is not None
    return torchrun, int(torchrun.stdout.readline())


def test_a_signal_to_torchrun_itself_reaches_the_rank_or_the_rank_notices(tmp_path, warm_commands):
    """The table of signals in docs/checkpoints.md: SIGTERM, SIGHUP and SIGINT are handed on, SIGUSR1 and SIGKILL end torchrun.
    What a rank makes of SIGHUP and SIGINT, `PreemptionCallback` hears; here it takes all for one. Its own interpreter makes it a
    child of torchrun, which a fork of the server of commands isn't."""
    rank = tmp_path / "rank.py"
    rank.write_text(
        RANK.replace(
            "    signal.signal(signal.SIGTERM, save)", "    for number in (1, 2, 15): signal.signal(number, save)"
        )
    )
    runs = {}
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGKILL):
        file = tmp_path / number.name
        line = ["torchrun", "--nproc-per-node=1", "--rdzv-endpoint=localhost:0", "--rdzv-backend=c10d", "--no-python"]
        runs[number, file] = subprocess.Popen(
            [*line, sys.executable, str(rank), "saves", str(file)],
            env=os.environ | warm_commands, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
        )  # fmt: skip
    pids = [int(torchrun.stdout.readline()) for torchrun in runs.values() if torchrun.stdout is not None]
    time.sleep(0.3)
    for number, _ in runs:
        runs[number, _].send_signal(number)
    codes = {number.name: torchrun.wait(60) for (number, _), torchrun in runs.items()}
    wait_for_end(*pids)
    assert {number.name: file.exists() for number, file in runs} == dict.fromkeys(codes, True)
    assert all(codes.values()), codes


@pytest.mark.parametrize("late", [False, True], ids=["then", "before it could look"])
@pytest.mark.parametrize("how", ["saves", "hangs", "does nothing about it"])
def test_a_rank_ends_with_torchrun_and_saves_if_it_can(tmp_path, how, late):
    torchrun, rank = started(how, tmp_path / "file", **({"LATE": "1"} if late else {}))
    if not late:
        assert torchrun.stdout is not None and torchrun.stdout.readline() == "watched\n"
    torchrun.kill()
    torchrun.wait()
    wait_for_end(rank)
    assert (tmp_path / "file").exists() == (how == "saves")


def test_a_rank_ends_with_the_launcher_though_torchrun_lives_on(tmp_path):
    launcher = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    name = f"{launcher.pid} {parent_watchdog._start_time(launcher.pid)}"
    torchrun, rank = started("saves", tmp_path / "file", NEMO2_LAUNCHER=name)
    time.sleep(0.3)
    assert parent_watchdog._start_time(rank), "both are there"
    launcher.kill()  # and isn't waited for: a zombie is no launcher
    wait_for_end(rank)
    assert torchrun.wait(20) == 143
    launcher.wait()


def test_a_launcher_that_ended_before_the_rank_began_is_noticed_and_so_is_another_process_of_its_id(tmp_path):
    for name in ("999999999 5", f"{os.getpid()} 5"):
        torchrun, rank = started("saves", tmp_path / "file", NEMO2_LAUNCHER=name)
        wait_for_end(rank)
        assert torchrun.wait(20) == 143


def test_a_process_that_nobody_launched_is_left_alone(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert parent_watchdog.end_with_parents() is False
    assert parent_watchdog.is_running(parent_watchdog.process_identity())


def test_what_killed_launches_left_is_swept_and_what_is_in_use_stays(tmp_path):
    from nemo2.launch.local import LAUNCHER_FILE, sweep_staging

    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for name, launcher in {
        "mine": parent_watchdog.process_identity(),
        "killed": f"{ended.pid} 5",
        "unsaid": None,
    }.items():
        (tmp_path / name).mkdir()
        if launcher is not None:
            (tmp_path / name / LAUNCHER_FILE).write_text(launcher)
    assert sweep_staging(tmp_path) == [tmp_path / "killed"]
    os.utime(tmp_path / "unsaid", (1, 1))
    assert sweep_staging(tmp_path) == [tmp_path / "unsaid"]
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_closed_terminal_ends_the_ranks_unless_it_was_to_be_ignored():
    from nemo2.launch.signals import own_signals, raise_on_signals

    with own_signals():
        raise_on_signals()
        with pytest.raises(SystemExit) as caught:
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(1)
        assert caught.value.code == 128 + signal.SIGHUP
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with own_signals():
            raise_on_signals()
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
