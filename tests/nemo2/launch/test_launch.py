# SPDX-License-Identifier: Apache-2.0
"""Launching: a run's end reaches the caller as it was, the first failure is the one that is told, nothing is left behind."""

import errno
import gc
import io
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import asdict
from pathlib import Path

import fiddle as fdl
import nemo_run
import psutil
import pytest
from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer

from nemo2.base.errors import ConfigError, Preempted, RuntimeFault
from nemo2.config import Config, Partial
from nemo2.launch import RankFailure, experiment, launch
from nemo2.launch.exit_causes import first_failure, rank_exits
from nemo2.launch.experiment import prepare_executor
from nemo2.launch.failure import explain_failure, last_traceback
from nemo2.launch.kubeflow import pod
from nemo2.launch.launcher import apply_shape
from nemo2.launch.local import rank_variables, split_secrets, stop_processes
from nemo2.launch.signals import own_signals, raise_on_signals
from nemo2.launch.stream import Follower, RunDisplay, without_rank
from nemo2.mcore.settle import Machine
from nemo2.training.run_dir.faults import FAULT_DIR_VARIABLE, HANG, Fault, read_faults, record_fault
from nemo2.training.run_dir.progress_line import format_line
from nemo2.training.run_dir.waiting import waiting_line
from support.waiting import wait_for_end

REPORT = """\
============================================================
nemo_run.core.runners.fdl_runner FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-01-01_10:00:01
  host      : h
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 11)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_10:00:00
  host      : h
  rank      : 1 (local_rank: 1)
  exitcode  : {code} (pid: 12)
  error_file: <N/A>
  traceback : x
============================================================
"""


@pytest.fixture
def logs(tmp_path):
    """The files that torchx and torchrun leave for one job."""
    folder = tmp_path / "job" / "nemo_run" / "app-1" / "role" / "0"
    folder.mkdir(parents=True)

    def write(*, stdout="", stderr=""):
        (folder / "stdout.log").write_text(stdout)
        (folder / "stderr.log").write_text(stderr)
        return tmp_path / "job"

    return write


def fault(tmp_path, *, rank, at, kind="ValueError", message="m", explained=False):
    folder = tmp_path / "faults"
    folder.mkdir(exist_ok=True)
    content = Fault(rank=rank, time=at, kind=kind, message=message, traceback="Traceback ...", explained=explained)
    (folder / f"rank-{rank}.json").write_text(json.dumps(asdict(content)))
    return folder


def test_the_earliest_written_error_is_the_cause(tmp_path, logs):
    job = logs(stderr=REPORT.format(code=1))
    folder = fault(tmp_path, rank=0, at=20.5, kind="RuntimeError", message="Connection closed by peer")
    fault(tmp_path, rank=1, at=20.4, kind="OSError", message="the disk is full")
    failure = explain_failure(fault_dir=folder, log_dir=job)
    assert failure.rank == 1
    assert str(failure) == f"rank 1 failed first: OSError: the disk is full. Logs of all ranks: {job}"
    assert isinstance(failure, RuntimeFault)


def test_a_killed_rank_is_the_cause_even_if_another_wrote_an_error_about_it(tmp_path, logs):
    job = logs(stderr=REPORT.format(code=-9))
    folder = fault(tmp_path, rank=0, at=1.0, kind="RuntimeError", message="Connection reset by peer")
    failure = explain_failure(fault_dir=folder, log_dir=job)
    assert failure.rank == 1 and failure.exit_code == -9
    assert "rank 1 was killed by SIGKILL" in str(failure) and "ran out of memory" in str(failure)


def test_a_hang_is_the_cause_even_if_the_silent_rank_was_killed(tmp_path, logs):
    job = logs(stderr=REPORT.format(code=-9))
    folder = tmp_path / "faults"
    folder.mkdir()
    (folder / "rank-0.stacks").write_text(
        'Timeout (0:00:25)!\nThread 1 (most recent call first):\n  File "x.py", line 1 in f\n'
    )
    (folder / "rank-1.heartbeat").write_text(json.dumps({"time": time.time() - 25, "step": 4}))
    (folder / "rank-1.stopped").write_text("")
    failure = explain_failure(fault_dir=folder, log_dir=job)
    assert failure.rank == 1 and "memory" not in str(failure)
    assert str(failure).startswith("Hang: rank 1 stopped reporting at") and "was stopped (SIGSTOP" in str(failure)


def test_an_error_that_left_the_other_ranks_waiting_is_the_cause_and_not_their_hang(tmp_path, logs):
    folder = fault(tmp_path, rank=1, at=time.time() - 60, kind="OSError", message="the disk is full")
    (folder / "rank-0.stacks").write_text("Timeout (0:00:25)!\nThread 1 (most recent call first):\n")
    failure = explain_failure(fault_dir=folder, log_dir=logs(stderr=REPORT.format(code=1)))
    assert failure.rank == 1 and "OSError: the disk is full" in str(failure)


def test_an_error_without_a_message_is_told_by_the_line_that_raised_it(tmp_path, monkeypatch):
    monkeypatch.setenv(FAULT_DIR_VARIABLE, str(tmp_path))
    try:
        assert tmp_path is None
    except AssertionError as error:
        error.args = ()
        record_fault(error)
    [fault] = read_faults(tmp_path)
    assert fault.message.startswith(f'no message; raised at File "{__file__}"')
    assert "assert tmp_path is None" in fault.message


def test_the_fault_that_knows_the_reason_comes_before_earlier_ones_that_do_not(tmp_path):
    def write(rank: int, when: float, message: str) -> None:
        fault = Fault(rank=rank, time=when, kind="SaveFailed", message=message, traceback="", explained=True)
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps(asdict(fault)))

    write(0, 1.0, "Saving step=3 failed: on another rank, whose log gives the reason.")
    write(1, 2.0, "Saving step=3 failed: File too large.")
    write(2, 1.5, "[gloo] Connection closed by peer [127.0.0.1]:3")
    write(3, 3.0, "Saving step=3 failed: No space left on device.")
    assert [fault.rank for fault in read_faults(tmp_path)] == [1, 3, 0, 2]


def test_a_rank_that_wrote_nothing_is_read_from_its_output(tmp_path, logs):
    output = textwrap.dedent("""\
        [default0]:Traceback (most recent call last):
        [default0]:RuntimeError: Connection closed
        [default1]:some warning
        [default1]:Traceback (most recent call last):
        [default1]:  File "x.py", line 1, in f
        [default1]:    g()
        [default1]:package.errors.ShapeError: 3 is not 4
        """)
    failure = explain_failure(fault_dir=tmp_path / "none", log_dir=logs(stderr=output + REPORT.format(code=1)))
    assert str(failure).startswith("rank 1 failed first: ShapeError: 3 is not 4. Logs")
    assert failure.details.splitlines()[1] == '  File "x.py", line 1, in f'


def test_without_any_trace_the_last_output_is_shown(tmp_path, logs):
    failure = explain_failure(fault_dir=tmp_path / "none", log_dir=logs(stderr="torchrun: command failed\n"))
    assert failure.rank is None and "torchrun: command failed" in str(failure)


def test_torchruns_report_is_read_root_cause_first():
    assert rank_exits(REPORT.format(code=-11)) == [(1, -11), (0, 1)]
    assert rank_exits("nothing") == []


def test_a_hang_is_told_before_the_signal_that_ended_the_silent_rank_and_a_signal_before_other_errors():
    faults = [
        Fault(rank=3, time=1.0, kind=kind, message="m", traceback="", explained=True) for kind in (HANG, "OSError")
    ]
    killed = REPORT.format(code=-9)
    causes = [first_failure([fault], report) for fault in faults for report in (killed, REPORT.format(code=1))]
    assert [cause and (cause.rank, "SIGKILL" in cause.message) for cause in causes] == [
        *[(3, False)] * 2,
        *[(1, True), (3, False)],
    ]


@pytest.mark.parametrize("character", ["a", "é", "字"])
def test_a_pods_last_message_is_cut_to_what_kubernetes_keeps(tmp_path, monkeypatch, character):
    monkeypatch.setenv(pod.TERMINATION_LOG_VARIABLE, str(tmp_path / "log"))
    error = Fault(rank=3, time=1.0, kind="OSError", message=character * 5000, traceback="", explained=False)
    pod._write_termination_message(error, 1)
    text = (tmp_path / "log").read_text()
    words = pod.read_termination_message(text)
    assert len(text.encode()) <= 4096 and words is not None and words["rank"] == 3
    assert words["message"].startswith(character * 500) and words["message"].endswith(f"{character} ...")


def test_the_last_of_chained_tracebacks_counts():
    lines = ["Traceback (most recent call last):", "KeyError: 'a'", "", "During handling ...", ""]
    lines += ["Traceback (most recent call last):", '  File "a", line 1', "ValueError: b", "more output"]
    assert last_traceback(lines)[:2] == ("ValueError", "b")
    assert last_traceback(["fine"]) == ("", "", "")


def test_only_rank_0_is_shown_and_its_last_traceback_is_left_to_the_exception(logs):
    line = format_line("Training", epoch=0, step=0, last_step=9, metrics={"reduced_train_loss": 2.0})
    job = logs(
        stdout=f"[default0]:hello\n[default1]:hello\n[default0]:{line}\n",
        stderr="W0101 torchrun speaks\n[default1]:w\n[default0]:w\n[default0]:Traceback (most recent call last):\n"
        "[default0]:ValueError: b\n",
    )
    out, err = io.StringIO(), io.StringIO()
    display = RunDisplay(job, out=out, err=err)
    assert display.poll() and not display.poll()
    display.close(succeeded=False)
    assert out.getvalue() == f"hello\n{line}\n" and err.getvalue() == "w\n"


def test_a_traceback_that_was_survived_is_shown(logs):
    job = logs(stderr="[default0]:Traceback (most recent call last):\n[default0]:ValueError: b\n")
    err = io.StringIO()
    display = RunDisplay(job, out=io.StringIO(), err=err)
    display.close(succeeded=True)
    assert "ValueError: b" in err.getvalue()


def test_a_terminal_says_that_the_ranks_start_until_their_first_output(logs, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    for stdout in ("[default0]:hello\n", ""):
        out, err = Terminal(), Terminal()
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        with waiting_line("starting", after=0):
            display = RunDisplay(logs(stdout=stdout))
            while not err.getvalue():
                time.sleep(0.005)
            display.close(succeeded=True)
        assert (err.getvalue(), out.getvalue()) == ("starting ...\r\033[K", "hello\n" if stdout else "")


@pytest.mark.parametrize("step", [6, None])
def test_an_interrupted_run_shows_what_its_ranks_saved_while_they_ended(step, tmp_path, logs, monkeypatch, capsys):
    job = logs(stderr="[default0]:first\n")

    def ended(_):
        if step is not None:
            monkeypatch.setenv(FAULT_DIR_VARIABLE, str(tmp_path))
            monkeypatch.setattr("nemo2.training.run_dir.faults._step", None)
            record_fault(Preempted("SIGTERM after step 6"), step=step)
            logs(stderr="[default0]:first\n[default0]:saved step=6. Run the same command again to resume.\n")

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(experiment, "stop_processes", ended)
    monkeypatch.setattr(experiment, "_status", interrupted)
    with pytest.raises(KeyboardInterrupt):
        experiment._follow(None, job, set(), faults=tmp_path)
    told = capsys.readouterr().err.splitlines()
    assert told[:2] == ["first", "ending the ranks; press Ctrl-C again to kill them"]
    if step is None:
        assert len(told) == 3 and "nothing was trained or saved" in told[2]
    else:
        assert told[2:] == ["saved step=6. Run the same command again to resume."]


def test_a_growing_file_is_read_line_by_line(tmp_path):
    follower = Follower(tmp_path / "f")
    assert follower.read() == []
    (tmp_path / "f").write_bytes(b"one\ntw")
    assert follower.read() == ["one"]
    with open(tmp_path / "f", "ab") as file:
        file.write(b"o\n 1%\r 50%\r100%\n\xff\n")
    assert follower.read() == ["two", "100%", "\ufffd"]


def test_the_marks_of_torchrun_are_taken_off():
    assert without_rank("[default12]:a [b]: c") == (12, "a [b]: c")
    assert without_rank("[W123] torchrun") == (None, "[W123] torchrun")


def test_ranks_get_this_interpreter_and_their_share_of_the_cores(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("nemo2.launch.local.usable_cores", lambda: 8)
    variables = rank_variables(ranks=3, staging=tmp_path, requested={})
    assert variables["OMP_NUM_THREADS"] == "2"
    assert rank_variables(ranks=20, staging=tmp_path, requested={})["OMP_NUM_THREADS"] == "1"
    assert rank_variables(ranks=2, staging=tmp_path, requested={"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "7"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert "OMP_NUM_THREADS" not in rank_variables(ranks=3, staging=tmp_path, requested={})


def test_an_interpreter_without_torchrun_beside_it_gets_one(tmp_path, monkeypatch):
    interpreter = tmp_path / "odd place" / "python"
    interpreter.parent.mkdir()
    interpreter.symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    path = rank_variables(ranks=1, staging=tmp_path / "s", requested={})["PATH"].split(os.pathsep)[0]
    script = Path(path, "torchrun")
    assert os.access(script, os.X_OK) and f'"{interpreter}" -m torch.distributed.run "$@"' in script.read_text()
    subprocess.run(["sh", "-n", script], check=True)


def test_secrets_are_not_among_the_variables_that_nemo_run_writes_down(tmp_path):
    assert split_secrets({"HF_TOKEN": "x", "A": "b"}) == ({"A": "b"}, {"HF_TOKEN": "x"})
    executor = nemo_run.LocalExecutor(ntasks_per_node=2, env_vars={"HF_TOKEN": "canary", "NCCL_DEBUG": "INFO"})
    assert prepare_executor(executor, staging=tmp_path) == {"HF_TOKEN": "canary"}
    assert "canary" not in str(executor.env_vars) and executor.env_vars["NCCL_DEBUG"] == "INFO"


def test_clusters_that_write_secrets_down_are_warned_of(tmp_path, capsys):
    far = nemo_run.LeptonExecutor(container_image="i", nemo_run_dir="/jobs", env_vars={"WANDB_API_KEY": "canary"})
    assert prepare_executor(far, staging=tmp_path) == {} and far.env_vars["WANDB_API_KEY"] == "canary"
    assert "warning: WANDB_API_KEY will be written into the job's script" in capsys.readouterr().err


def test_an_executor_that_is_passed_in_is_not_changed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("nemo_run.config._NEMORUN_HOME", str(tmp_path))
    mine = nemo_run.LocalExecutor(ntasks_per_node=1, env_vars={"A": "b"})
    launch(Partial(entry), mine, devices=2, env={"C": "d"}, dryrun=True, check=False)
    shown = capsys.readouterr().out
    assert "--nproc-per-node 2" in shown and "  A=b\n" in shown and "  C=d\n" in shown
    assert mine.env_vars == {"A": "b"} and mine.nproc_per_node() == 1 and mine.launcher is None


def test_a_full_disk_under_nemo_runs_home_is_named(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("nemo_run.config._NEMORUN_HOME", str(tmp_path))
    monkeypatch.setattr("nemo2.launch.local.write_text", full)
    with pytest.raises(ConfigError, match=f"{tmp_path}.*No space left on device.*set NEMORUN_HOME to another disk"):
        launch(Partial(entry), devices=2, dryrun=True, check=False)


def entry(trainer=None, log=None):
    """Stands for an entry point with the fields that a shape is written to."""


class Part:
    def __init__(self, devices=8, num_nodes=1, name="default"):
        pass


def test_devices_nodes_and_name_are_written_into_the_recipe():
    recipe = Partial(entry, trainer=Config(Part), log=Config(Part))
    assert apply_shape(recipe, Machine(), devices=None, nodes=None, name=None) == (8, 1, "default")
    assert apply_shape(recipe, Machine(), devices=2, nodes=3, name="mine") == (2, 3, "mine")
    assert (recipe.trainer.devices, recipe.trainer.num_nodes, recipe.log.name) == (2, 3, "mine")
    assert apply_shape(Partial(entry), Machine(), devices=None, nodes=None, name=None) == (1, 1, "entry")


@pytest.mark.parametrize(("field", "value"), [("devices", 0), ("devices", True), ("nodes", -1), ("devices", "2")])
def test_a_shape_that_is_no_number_of_processes_is_refused(field, value):
    shape = {"devices": None, "nodes": None, "name": None} | {field: value}
    with pytest.raises(ConfigError, match=f"{field}=.*must be a whole number of at least 1"):
        apply_shape(Partial(entry), Machine(), **shape)


def test_a_launch_from_within_a_rank_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv(FAULT_DIR_VARIABLE, str(tmp_path))
    with pytest.raises(RuntimeFault, match="__main__"):
        launch(Partial(entry))


def test_whole_trees_of_processes_are_ended():
    program = (
        "import subprocess, sys; c = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        "print(c.pid, flush=True); c.wait()"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    stop_processes([parent.pid], grace_seconds=1.0)
    assert parent.wait(5) == -signal.SIGTERM
    wait_for_end(child)


TASKS = '''
"""The program of the ranks of the tests below."""
import os
import signal
import sys
import time

from nemo2.training.run_dir.faults import install_fault_hook
from nemo2.training.run_dir.progress_line import format_line
from nemo2.training.run_dir.waiting import waiting_line

RANK = int(os.environ.get("RANK", "0"))


def start_together():
    folder = os.path.dirname(__file__)
    open(os.path.join(folder, f"pid-{os.getpid()}"), "w").close()
    while sum(name.startswith("pid-") for name in os.listdir(folder)) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)


def work(canary_file: str):
    start_together()
    for step in range(2):
        print(format_line("Training", epoch=0, step=step, last_step=1, metrics={"reduced_train_loss": 2.0}), flush=True)
    with open(os.environ["NEMO2_RUN_DIR_FILE"], "w") as file:
        file.write(os.path.dirname(canary_file))
    with open(f"{canary_file}-{RANK}", "w") as file:
        file.write(f"{sys.executable} {os.environ['WORLD_SIZE']} {os.environ['HF_TOKEN']}")


def fail():
    start_together()
    install_fault_hook()
    if RANK == 1:
        raise OSError("the disk of rank 1 is full")
    time.sleep(120)


def die():
    start_together()
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(120)


def wait():
    start_together()
    print("waiting", flush=True)
    time.sleep(120)
'''


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """A module that the ranks can import too, and a home for nemo-run."""
    (tmp_path / "launch_tasks.py").write_text(TASKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("NEMORUN_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("nemo_run.config._NEMORUN_HOME", str(tmp_path / "home"))  # read once, on import
    sys.modules.pop("launch_tasks", None)
    import launch_tasks  # pyright: ignore[reportMissingImports]

    yield launch_tasks
    sys.modules.pop("launch_tasks", None)


def ranks(folder):
    """Of the ranks that ran one of `TASKS`, which stand in ``folder``: how many started, and which didn't end."""
    pids = [int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")]
    _, running = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=10)
    return len(pids), running


def test_a_run_of_two_ranks_succeeds_in_this_interpreter_and_leaves_no_secret(
    tasks, tmp_path, warm_interpreter, capsys
):
    recipe = Partial(tasks.work, canary_file=str(tmp_path / "done"))
    result = launch(recipe, devices=2, name="works", check=False, env={"HF_TOKEN": "canary-8d3f"})
    assert (result.status, result.exit_code, result.run_dir) == ("succeeded", 0, tmp_path)
    for rank in range(2):
        interpreter, world, token = (tmp_path / f"done-{rank}").read_text().split()
        assert Path(interpreter).parent == Path(sys.executable).parent
        assert (world, token) == ("2", "canary-8d3f")
    out = capsys.readouterr().out
    assert out.count("iteration 1/1") == 1, "only rank 0 is shown"
    assert ranks(tmp_path) == (2, [])
    assert not list((tmp_path / "home" / "nemo2").iterdir())
    leaked = [path for path in (tmp_path / "home").rglob("*") if path.is_file() and b"canary-8d3f" in path.read_bytes()]
    assert not leaked
    (config,) = (tmp_path / "home" / "experiments" / "works").glob("*/_CONFIG")
    stored = ZlibJSONSerializer().deserialize(config.read_text())
    assert fdl.get_callable(stored) is nemo_run.Experiment, "nemo-run's commands read it without nemo2"


@pytest.mark.parametrize(
    ("task", "message"),
    [("fail", "rank 1 failed first: OSError: the disk of rank 1 is full"), ("die", "rank 1 was killed by SIGKILL")],
)
def test_a_failing_rank_ends_the_others_at_once_and_is_raised_here(tasks, tmp_path, warm_interpreter, task, message):
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(RankFailure, match=message) as caught:
        launch(Partial(getattr(tasks, task)), devices=2, name=task, check=False)
    assert caught.value.rank == 1 and caught.value.log_dir.is_dir()
    assert ranks(tmp_path) == (2, [])
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_signals_end_the_wait_and_the_handlers_are_put_back(number):
    error = KeyboardInterrupt if number == signal.SIGINT else SystemExit
    before = [signal.getsignal(each) for each in signal.Signals]
    with pytest.raises(error) as caught, own_signals():
        raise_on_signals()
        os.kill(os.getpid(), number)
        time.sleep(5)
    assert number == signal.SIGINT or caught.value.code == 128 + number
    assert [signal.getsignal(each) for each in signal.Signals] == before


def test_signals_at_short_intervals_are_heard_once_a_second(monkeypatch):
    """Who presses Ctrl-C again and again is heard: the second counts from the signal that raised."""
    clock, raised = [0.0], []
    monkeypatch.setattr("nemo2.launch.signals.time.monotonic", lambda: clock[0])
    with own_signals():
        raise_on_signals()
        for tenths in range(26):
            clock[0] = tenths / 10
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                raised.append(tenths)
    assert raised == [0, 10, 20]


@pytest.mark.parametrize("again_after", [None, 0.01], ids=["once", "twice"])
def test_a_signal_to_the_launcher_ends_the_ranks(tasks, tmp_path, warm_interpreter, again_after):
    """``timeout`` sends a signal twice, to its child and to the group."""
    program = textwrap.dedent("""
        import launch_tasks
        from nemo2.config import Partial
        from nemo2.launch import launch
        if __name__ == "__main__":
            launch(Partial(launch_tasks.wait), devices=2, name="waits", check=False)
    """)
    script = tmp_path / "program.py"
    script.write_text(program)
    process = subprocess.Popen(
        [warm_interpreter, str(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGTERM)
        if again_after is not None:
            time.sleep(again_after)
            process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
        assert ranks(tmp_path) == (2, [])
    finally:
        process.kill()
        process.wait()


def test_the_programs_logging_outlives_an_experiment(tasks, tmp_path, capsys):
    """nemo-run's own experiment closes the file and takes another handler away when it is collected."""
    root = logging.getLogger()
    level, file = root.level, logging.FileHandler(tmp_path / "mine.log")
    root.addHandler(file)
    handlers = root.handlers[:]
    try:
        root.setLevel(logging.INFO)
        launch(Partial(tasks.wait), devices=1, name="plan", check=False, dryrun=True)
        gc.collect()
        assert (root.handlers, root.level) == (handlers, logging.INFO)
        logging.getLogger("mine").info("still here")
        assert "still here" in (tmp_path / "mine.log").read_text()
    finally:
        root.setLevel(level)
        root.removeHandler(file)
        file.close()


def test_a_dry_run_starts_nothing_and_says_what_it_would(tasks, tmp_path, capsys):
    result = launch(Partial(tasks.wait), devices=2, name="dry", check=False, dryrun=True)
    assert result.status == "dryrun"
    out = capsys.readouterr().out
    assert "torchrun --nnodes 1 --nproc-per-node 2" in out and "PATH=" in out
    assert ranks(tmp_path) == (0, [])
