# SPDX-License-Identifier: Apache-2.0
"""The helper that runs functions on gloo ranks must itself be trustworthy."""

import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from support import ranks
from support.waiting import wait_for_end


@dataclass
class Point:
    """Defined in a test module, to travel there and back."""

    x: int


def add_over_ranks(point: Point, *, scale: int) -> tuple[int, Point]:
    total = torch.tensor(point.x * (torch.distributed.get_rank() + 1))
    torch.distributed.all_reduce(total)
    return int(total) * scale, Point(torch.distributed.get_rank())


def fail_on(rank: int) -> None:
    if torch.distributed.get_rank() == rank:
        raise ValueError("the reason")
    torch.distributed.barrier()


def leave_a_child_and_hang(pid_file: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pid_file.write_text(str(child.pid))
    time.sleep(600)


def speak_and_die() -> None:
    print("said before", file=sys.stderr, flush=True)
    os._exit(3)


def busy(seconds: float) -> None:
    while time.process_time() < seconds:
        pass


def die() -> None:
    os._exit(3)


def environment() -> tuple[str, bool]:
    return os.environ["MARK"] + os.environ["RANK"] + os.environ["MASTER_ADDR"], torch.distributed.is_initialized()


def unprepared() -> set[str]:
    import sys

    return {"pytest", "support.warm", "nemo2.training.trainer", "nemo2.models.conversion.families"} - set(sys.modules)


def test_a_rank_has_imported_what_its_server_was_to_import(run_on_ranks):
    """Python drops the error of a server that couldn't: each rank would import for seconds."""
    assert run_on_ranks(unprepared, 1) == [set()]


def test_results_come_back_in_order_of_rank(run_on_ranks):
    assert run_on_ranks(add_over_ranks, 2, Point(5), scale=2) == [(30, Point(0)), (30, Point(1))]


def test_the_first_failing_rank_is_the_one_shown(run_on_ranks):
    with pytest.raises(AssertionError, match=r"(?s)rank 1 of 2 failed: ValueError: the reason.*in fail_on"):
        run_on_ranks(fail_on, 2, 1)


def test_ranks_tell_what_they_spent(run_on_ranks):
    before = ranks.cpu_seconds()
    run_on_ranks(busy, 2, 0.3)
    assert ranks.cpu_seconds() - before >= 0.6


def test_what_quiet_ranks_print_is_shown_where_one_fails(run_on_ranks, capfd):
    with pytest.raises(ranks.RankFailed, match=r"(?s)without an answer \(exit code 3\).*said before"):
        run_on_ranks(speak_and_die, 1, quiet=True)
    assert "said before" not in "".join(capfd.readouterr())


def test_a_dead_rank_is_an_error_and_not_a_wait(run_on_ranks):
    with pytest.raises(AssertionError, match="ended without an answer"):
        run_on_ranks(die, 1)


def test_a_rank_that_was_killed_is_named_beside_a_peer_that_heard_of_it_first(tmp_path):
    both = ranks._Ranks(1.0, tmp_path, quiet=False)
    both.processes = [SimpleNamespace(exitcode=-9, join=lambda _: None)] * 2
    both.connections, (died, heard) = zip(*(multiprocessing.Pipe(duplex=False) for _ in range(2)), strict=True)
    heard.send((0.0, "error", "RuntimeError: Connection closed by peer", "its traceback"))
    died.close()
    with pytest.raises(
        ranks.RankFailed, match=r"(?s)^rank 1 of 2 failed: RuntimeError.*rank 0: .* an answer \(SIGKILL"
    ):
        both.results()


def test_a_hanging_rank_is_ended_with_its_children_and_shows_where_it_hangs(run_on_ranks, tmp_path):
    with pytest.raises(AssertionError, match=r"(?s)no answer within 3.*leave_a_child_and_hang"):
        run_on_ranks(leave_a_child_and_hang, 1, tmp_path / "pid", timeout=3.0)
    pid = int((tmp_path / "pid").read_text())
    wait_for_end(pid)


def test_the_time_in_which_the_server_imports_is_none_of_the_ranks(run_on_ranks, monkeypatch):
    begun, start = time.monotonic(), ranks._Ranks.start
    hours: list[int] = []
    clock = SimpleNamespace(monotonic=lambda: begun + 3600 * len(hours), time=time.time)
    monkeypatch.setattr(ranks, "time", clock)
    monkeypatch.setattr(ranks._Ranks, "start", lambda *arguments: (hours.append(1), start(*arguments)))
    assert run_on_ranks(environment, 1, init_process_group=False, env={"MARK": "m"}) == [("m0127.0.0.1", False)]


def test_without_a_process_group_ranks_get_the_environment_of_torchrun(run_on_ranks):
    answers = run_on_ranks(environment, 2, init_process_group=False, env={"MARK": "m"})
    assert answers == [("m0127.0.0.1", False), ("m1127.0.0.1", False)]


def test_among_workers_long_files_come_first_and_each_keeps_its_order(request, tmp_path):
    conftest = request.config.pluginmanager.get_plugin(str(Path(__file__).with_name("conftest.py")))
    files = {"units": 'x = "units"', "ranks": "", "commands": "import subprocess"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    items = [
        SimpleNamespace(
            path=tmp_path / file,
            name=f"{file}{number}",
            fixturenames=("run_on_ranks",) if file == "ranks" else (),
            get_closest_marker=lambda name: None,
        )
        for number in range(3)
        for file in ("units", "ranks", "units", "commands", "commands")
    ]
    alone, shared = list(items), list(items)
    conftest.pytest_collection_modifyitems(SimpleNamespace(), alone)
    conftest.pytest_collection_modifyitems(SimpleNamespace(workerinput={}), shared)
    assert alone == items
    assert [item.path.name for item in shared] == ["commands"] * 6 + ["ranks"] * 3 + ["units"] * 6
    assert [item.name for item in shared if item.path.name == "ranks"] == ["ranks0", "ranks1", "ranks2"]
