# SPDX-License-Identifier: Apache-2.0
"""Jobs on Slurm, on a stand-in for it: commands of its names that run scripts here. `make cluster` runs the real one."""

import errno
import io
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time
from dataclasses import asdict, replace
from pathlib import Path

import nemo_run
import pytest
from nemo_run.core.execution.launcher import FaultTolerance

from nemo2.base.errors import ConfigError, RuntimeFault
from nemo2.checkpoint.directory import Manifest, write_manifest
from nemo2.config import Config, Partial
from nemo2.data import PreTrainingDataModule
from nemo2.launch import RankFailure, launch
from nemo2.launch.rank import end_with_a_later_life
from nemo2.launch.request import LaunchRequest
from nemo2.launch.slurm import job_result, probing, queue, ship
from nemo2.launch.slurm.job_result import ASKED, STALLED, history, judge, record
from nemo2.launch.slurm.script import MOST_UNJUDGED, SCRIPT, Job, job_script
from nemo2.launch.slurm.settings import ClusterSettings, limit_seconds
from nemo2.launch.slurm.shell import LocalShell, RemoteLines, shell_of
from nemo2.launch.slurm.start import _grace, job_of, prepare
from nemo2.recipes import llama3_70b, llama_tiny
from nemo2.training.run_dir.faults import HANG, Fault
from nemo2.training.run_dir.preemption import PreemptionCallback
from support.waiting import wait_until

ODD = "a b; $(touch ran) `touch ran` 'q' \"d\" \\ %s\nnew line"
"""It would run something, were it read as anything but text."""

STAND_INS = {
    # Each of srun's tasks one after the other: what is tested is what they are told.
    "srun": """
        [ -n "$NO_RANKS" ] && exit 1
        nodes=1 per=1
        while [ "${1#--}" != "$1" ]; do
            case $1 in --nodes=*) nodes=${1#*=} ;; --ntasks-per-node=*) per=${1#*=} ;; esac; shift
        done
        task=0 code=0
        while [ $task -lt $((nodes * per)) ]; do
            SLURM_PROCID=$task SLURM_NTASKS=$((nodes * per)) SLURM_LOCALID=$((task % per)) SLURM_NODEID=$((task / per)) \\
                SLURM_STEP_ID=0 "$@" >>"$NEMO2_LIFE/task-$task.out" 2>&1 || code=$?
            task=$((task + 1))
        done
        exit $code""",
    "scontrol": """
        echo "$*" >>"$STAND_IN/scontrol.asked"
        case "$1 $2" in
            "show job") echo "JobId=7 JobName=x JobState=${STATE:-RUNNING} Reason=None" ;;
            "show node") echo "NodeName=n NodeAddr=10.1.2.3 NodeHostName=n" ;;
            requeue*) (sleep 0.3; sh "$STAND_IN/start" "$(cat "$STAND_IN/script")") >/dev/null 2>&1 & kill -TERM $PPID ;;
        esac""",
    "sbatch": """
        for script; do :; done
        [ -n "$REFUSES" ] && { echo "sbatch: error: Batch job submission failed: $REFUSES" >&2; exit 1; }
        echo "$*" >>"$STAND_IN/sbatch.asked"
        echo "$script" >"$STAND_IN/script"
        [ -n "$HELD" ] || sh "$STAND_IN/start" "$script" >/dev/null 2>&1
        echo 7""",
    "start": """
        SLURM_JOB_ID=7 bash "$1" >>"$STAND_IN/out" 2>&1 & echo $! >"$STAND_IN/pid" """,
    "squeue": """
        if kill -0 "$(cat "$STAND_IN/pid")" 2>/dev/null; then echo RUNNING; else exit 0; fi""",
    "sacct": """
        echo "sacct: error: Slurm accounting storage is disabled" >&2; exit 1""",
    "scancel": """
        echo "$*" >>"$STAND_IN/scancel.asked" """,
}


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """The folder in which the stand-ins note what they were asked."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    for name, text in STAND_INS.items():
        (folder / name).write_text(f"#!/bin/bash\n{textwrap.dedent(text).strip()}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("STAND_IN", str(folder))
    monkeypatch.setenv("NEMORUN_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("nemo_run.config._NEMORUN_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return folder


def job(tmp_path, **fields):
    folder = tmp_path / "a folder; touch ran"
    folder.mkdir()
    program = folder / "program.py"
    program.write_text("import json, os, sys; print(json.dumps([dict(os.environ), sys.argv[1:]]))")
    return Job(
        **{
            "name": "x",
            "folder": str(folder),
            "nodes": 2,
            "devices": 2,
            "python": sys.executable,
            "program": "program.py",
        }
        | fields
    )


def run_script(one, **variables):
    script = Path(one.folder) / SCRIPT
    script.write_text(job_script(one))
    env = {**os.environ, "SLURM_JOB_ID": "12345", "SLURM_JOB_NODELIST": "n1", **variables}
    return subprocess.run(["bash", script], env=env, capture_output=True, text=True, timeout=60, check=False)


def each_sleep_lasts(slurm, seconds):
    """For scripts that look again after some seconds."""
    real = shutil.which("sleep", path=os.defpath)
    (slurm / "sleep").write_text(f"#!/bin/bash\nexec {real} {seconds}\n")
    (slurm / "sleep").chmod(0o755)


def tasks(one):
    files = sorted(Path(one.folder, "lives", "0").glob("task-*.out"))
    return [json.loads(file.read_text().splitlines()[-1]) for file in files]


def test_tasks_of_srun_know_who_they_are_and_values_arrive_as_they_are(slurm, tmp_path):
    one = job(tmp_path, starter="srun", variables={"ODD": ODD}, workdir="")
    assert run_script(one, SLURM_GPUS_PER_TASK="1", SLURM_TRES_PER_TASK="gres/gpu:1").returncode == 0
    told = tasks(one)
    wanted = [("0", "0"), ("1", "1"), ("2", "0"), ("3", "1")]
    assert [(env["RANK"], env["LOCAL_RANK"]) for env, _ in told] == wanted
    assert {(env["WORLD_SIZE"], env["MASTER_ADDR"], env["ODD"]) for env, _ in told} == {("4", "10.1.2.3", ODD)}
    assert not any("PER_TASK" in name for env, _ in told for name in env), "each would see only its own GPU"
    assert all(arguments == [one.folder] for _, arguments in told)
    assert not list(tmp_path.rglob("ran")), "nothing of it was run"


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.7"])
def test_the_port_is_the_jobs_own_and_one_that_is_free(slurm, tmp_path, address):
    one = job(tmp_path, starter="srun", nodes=1, devices=1)
    with socket.create_server((address, 22345)):
        done = run_script(one)
    assert tasks(one)[0][0]["MASTER_PORT"] == "22346"
    assert "port 22345 of " in done.stdout and "is in use" in done.stdout


def test_tasks_get_the_variables_even_where_sbatch_exports_none(slurm, tmp_path):
    inside = job_script(job(tmp_path, container_image="i"))
    assert len(re.findall(r"srun (?!--export=ALL )--", inside)) == 0 and inside.count("srun --export=ALL ") == 2


def test_lines_of_sbatch_are_quoted_or_refused():
    one = Job(name="x", folder="/a b/100%", nodes=1, devices=1, directives={"comment": "two words", "exclusive": None})
    head = job_script(one).splitlines()
    assert '#SBATCH --output="/a b/100%%/job-%j.out"' in head
    assert '#SBATCH --comment="two words"' in head and "#SBATCH --exclusive" in head
    assert not any("--time" in line for line in head), "the partition's own limit, never ten minutes"
    with pytest.raises(ConfigError, match="--comment=.*line breaks"):
        job_script(replace(one, directives={"comment": "a\nb"}))


def test_a_container_is_given_the_jobs_folder_and_what_is_mounted():
    text = job_script(
        Job(name="x", folder="/j", nodes=1, devices=8, container_image="a/b:c", container_mounts=("/d d:/d d", "/r:/r"))
    )
    assert "--container-image=a/b:c" in text and "--container-mounts='/j:/j,/d d:/d d,/r:/r'" in text
    assert "srun --export=ALL --nodes=1 --ntasks=1 --overlap --container-image=a/b:c" in text, (
        "the verdict needs the image's Python"
    )


SHELL_OPTIONS = {
    "errexit": "set -e",
    "strict": "set -euo pipefail",
    "noclobber": "set -o noclobber",
    "noglob": "set -f",
    "posix": "set -o posix",
    "exported": "set -euo pipefail; export SHELLOPTS",
    "nocasematch": "shopt -s nocasematch nullglob failglob",
    "traps": "trap 'echo an error; exit 9' ERR; trap 'exit 9' CHLD TERM RETURN; trap 'seen=1' DEBUG; set -ET; trap '' USR1",
    "aliases": "shopt -s expand_aliases\nalias wait=false kill=false echo=false trap=false srun=false eval=false",
    "functions": "wait() { exit 9; }; kill() { exit 9; }; echo() { exit 9; }; trap() { exit 9; }; export -f wait kill",
    "variables": "_IFS=x; IFS=/; life=7 folder=/nowhere python=/bin/false code=9 state=FAILED verdict=failed",
    "redirection": "exec >/dev/null",
    "jobs": "set -m; sleep 20 >/dev/null 2>&1 & disown",
    "comment": "# the last line goes on \\",
}


@pytest.mark.parametrize(
    ("options", "program", "verdict"),
    [("strict", "", "done"), *((name, "raise SystemExit(3)", "again") for name in SHELL_OPTIONS)],
)
def test_what_set_up_lines_set_of_the_shell_changes_nothing_of_the_script(slurm, tmp_path, options, program, verdict):
    """``wait`` and ``kill`` end with codes that are no failures, and files are written twice."""
    one = job(tmp_path, starter="srun", nodes=1, devices=1, setup_lines=SHELL_OPTIONS[options])
    rank = 'import os, pathlib; pathlib.Path(os.environ["NEMO2_LIFE"], "rank-00000.out").touch(); '
    (Path(one.folder) / "program.py").write_text(rank + program)
    done = run_script(one, SLURM_JOB_ID="7")
    assert [life["verdict"] for life in history(Path(one.folder))] == [verdict], done.stdout + done.stderr
    assert done.returncode == {"done": 0, "again": -signal.SIGTERM}[verdict]
    assert ("requeue" in (slurm / "scontrol.asked").read_text()) == (verdict == "again"), "and Slurm then ends it"


def test_a_run_of_more_than_five_minutes_ends_as_a_short_one(slurm, tmp_path):
    """The process that watches for tasks that can't start has ended by then, and ``kill`` fails."""
    one = job(tmp_path, starter="srun", nodes=1, devices=1, setup_lines="set -euo pipefail")
    each_sleep_lasts(slurm, 0)  # five minutes are over at once
    (Path(one.folder) / "program.py").write_text("import time; time.sleep(1)")
    assert run_script(one).returncode == 0 and history(Path(one.folder))[0]["verdict"] == "done"


def test_what_set_up_lines_give_to_the_ranks_arrives(slurm, tmp_path):
    lines = "export FROM_LINES='a b'; umask 027; ulimit -n 77; cd /; trap 'echo cleaned up' EXIT\nset -eu"
    one = job(tmp_path, starter="srun", nodes=1, devices=1, setup_lines=lines)
    (Path(one.folder) / "program.py").write_text(
        "import json, os, resource\n"
        "print(json.dumps([os.environ['FROM_LINES'], os.umask(0), resource.getrlimit(resource.RLIMIT_NOFILE)[0]]))"
    )
    done = run_script(one)
    assert done.returncode == 0 and tasks(one) == [["a b", 0o027, 77]]
    assert done.stdout.splitlines()[-1] == "cleaned up", "a trap on EXIT is the user's own"


@pytest.mark.parametrize(
    ("lines", "state", "verdict"),
    [
        ("set -e\nsource /no/such/file", "RUNNING", "failed"),
        ("exit 0", "RUNNING", "failed"),
        ("if ; then", "RUNNING", "failed"),
        ("set -u; echo $NO_SUCH_NAME", "RUNNING", "failed"),
        ("exit 143", "RUNNING", "again"),
        ("exit 1", "PREEMPTED", "again"),
        ("exit 1", "CANCELLED", "cancelled"),
    ],
)
def test_set_up_lines_that_fail_end_the_job_with_their_exit_code_as_its_reason(slurm, tmp_path, lines, state, verdict):
    one = job(tmp_path, setup_lines=lines)
    run_script(one, STATE=state, SLURM_JOB_ID="7")
    told = history(Path(one.folder))[0]
    assert told["verdict"] == verdict
    assert verdict != "failed" or "setup_lines ended with exit code" in told["message"]
    assert not list(Path(one.folder, "lives", "0").glob("task-*.out")), "no rank started"


def test_a_job_whose_script_is_killed_is_judged_beside_the_first_rank(slurm, tmp_path):
    """The ranks have some seconds to save when the job ends with its script, and this process has them too.

    The four scripts are killed together, for a verdict that isn't given shows only in the time that it would take.
    """
    each_sleep_lasts(slurm, 0.2)
    killed = {
        by: killed_script(slurm, tmp_path / f"ended by {by}", by)
        for by in ("something", "slurm", "a later life", "another node")
    }
    asked = slurm / "scontrol.asked"
    wait_until(lambda: "requeue" in asked.read_text())
    time.sleep(2)  # far longer than it takes to look
    assert asked.read_text().count("requeue") == 1 and "requeue 1\n" in asked.read_text()
    verdicts = {by: [life["verdict"] for life in history(folder)] for by, folder in killed.items()}
    assert verdicts == {"something": ["again"], "slurm": [], "a later life": [], "another node": []}


def killed_script(slurm, place, ended_by):
    """The folder of a job whose script is killed once its rank runs."""
    place.mkdir()
    number = str(1 + ["something", "slurm", "a later life", "another node"].index(ended_by))
    one = job(place, starter="srun", nodes=1, devices=1)
    folder = Path(one.folder)
    (slurm / "srun").write_text(
        '#!/bin/bash\nwhile [ "${1#--}" != "$1" ]; do shift; done\n'
        f'exec env SLURM_PROCID=0 SLURM_STEP_ID=0 {"SLURMD_NODENAME=other" if ended_by == "another node" else "A=b"} "$@"\n'
    )
    program = (
        "import os, pathlib, time; pathlib.Path(os.environ['NEMO2_LIFE'], 'rank-00000.out').touch(); time.sleep(40)"
    )
    (folder / "program.py").write_text(program)
    (folder / SCRIPT).write_text(job_script(one))
    env = {**os.environ, "SLURM_JOB_ID": number}
    script = subprocess.Popen(["bash", folder / SCRIPT], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until((folder / "lives" / "0" / "rank-00000.out").exists)
    if ended_by == "slurm":
        line = f"slurmstepd: error: *** JOB {number} ON n CANCELLED AT 2026-11-23T08:53:44 DUE TO TIME LIMIT ***\n"
        (folder / f"job-{number}.out").write_text(line)
    if ended_by == "a later life":
        (folder / "lives" / "1").mkdir()
    script.kill()
    script.wait()
    return folder


# ----------------------------------------------------------------------------------------------------------- verdicts


def life(folder, number=0, *, faults=(), begun=True):
    place = folder / "lives" / str(number)
    (place / "faults").mkdir(parents=True)
    if begun:
        (place / "rank-00000.out").write_text("")
    for rank, fault in enumerate(faults):
        content = {"rank": rank, "time": 1.0 + rank, "message": "m", "traceback": "", "explained": False, **fault}
        (place / "faults" / f"rank-{rank}.json").write_text(json.dumps(asdict(Fault(**content))))
    return place


SAVED = {"kind": "Preempted", "message": "saved step 9.", "explained": True, "step": 9}


@pytest.mark.parametrize(
    ("faults", "code", "state", "verdict"),
    [
        ([], 0, "RUNNING", "done"),
        ([SAVED], 1, "RUNNING", "again"),
        ([{"kind": "RuntimeError"}, SAVED], 1, "RUNNING", "again"),
        ([SAVED], 1, "CANCELLED", "cancelled"),
        ([SAVED], 1, "PENDING", "again"),
        ([{"kind": "DataError", "explained": True}], 1, "RUNNING", "failed"),
        ([{"kind": "ConfigError", "explained": True}], 1, "RUNNING", "failed"),
        ([{"kind": "RuntimeError", "step": 3}], 1, "RUNNING", "again"),
        ([{"kind": "RuntimeFault", "explained": True, "step": 3}], 1, "RUNNING", "again"),
        ([{"kind": HANG, "explained": True}], 1, "RUNNING", "again"),
        ([], 137, "RUNNING", "again"),
        ([{"kind": "RuntimeError", "step": 3}], 1, "NODE_FAIL", "again"),
        ([{"kind": "ConfigError", "explained": True}], 1, "REQUEUED", "failed"),
    ],
)
def test_what_a_start_mends_is_started_again_and_nothing_else(tmp_path, faults, code, state, verdict):
    life(tmp_path, faults=faults)
    assert judge(tmp_path, life=0, code=code, state=state)["verdict"] == verdict


def test_ranks_that_never_began_have_failed(tmp_path):
    place = life(tmp_path, begun=False)
    (place / "task-0.out").write_text("bash: line 1: /no/python: No such file or directory\n")
    told = judge(tmp_path, life=0, code=127)
    assert told["verdict"] == "failed" and "/no/python" in told["message"]


def in_a_row(folder, verdicts, write, **job):
    """Lives one after the other, each as ``write(folder, number)`` leaves it, and what is told of the last."""
    told = {}
    for number, verdict in enumerate(verdicts):
        write(folder, number)
        told = judge(folder, life=number, **{"code": 1, **job})
        record(folder, number, told)
        assert told["verdict"] == verdict, number
    return told["message"]


def failing_at(*steps):
    return lambda folder, number: life(folder, number, faults=[{"kind": "RuntimeError", "step": steps[number]}])


def test_the_same_step_failing_twice_is_not_tried_a_third_time(tmp_path):
    assert "also failed at step 40" in in_a_row(tmp_path, ["again", "again", "failed"], failing_at(40, 41, 40))
    assert json.loads((tmp_path / "state.json").read_text())["state"] == "failed"


def test_failures_that_come_no_further_end_and_being_asked_to_stop_is_none(tmp_path):
    in_a_row(tmp_path, [*["again"] * STALLED, "failed"], failing_at(50, *range(10, 10 + STALLED)))
    in_a_row(tmp_path / "asked", ["again"] * 9, lambda folder, number: life(folder, number, faults=[SAVED]))


def test_what_is_asked_to_stop_at_one_step_again_and_again_needs_more_time(tmp_path):
    def write(folder, number):  # in its first step, or before
        life(folder, number, faults=[{**SAVED, "step": None if number % 4 else 0}])

    assert "longer time limit" in in_a_row(tmp_path, [*["again"] * (ASKED - 1), "failed"], write)


def test_a_run_that_a_lost_life_has_trained_to_the_end_is_done_and_one_submitted_in_vain_is_not(tmp_path):
    """A node that is cut off trains on until its job begins another life, and may come to the end before."""
    finished = {
        "kind": "RunFinished",
        "step": None,
        "explained": True,
        "message": "is at step 30: this run is complete.",
    }
    for number, verdict in enumerate(("failed", "done")):
        life(tmp_path, number, faults=[finished])
        assert judge(tmp_path, life=number, code=1)["verdict"] == verdict


def test_nodes_that_are_lost_are_no_failures_of_the_run(tmp_path):
    in_a_row(tmp_path, ["again"] * 2 * STALLED, failing_at(*[4] * 2 * STALLED), state="NODE_FAIL")


@pytest.mark.parametrize(
    ("line", "verdict"),
    [
        ("slurmstepd-n: error: *** JOB 12345 ON n CANCELLED AT 2026-11-23T08:53:44 DUE TO JOB REQUEUE ***", "again"),
        ("slurmstepd-n: error: *** JOB 12345 ON n CANCELLED AT 2026-11-23T08:53:44 DUE TO PREEMPTION ***", "again"),
        ("slurmstepd-n: error: *** JOB 12345 ON n CANCELLED AT 2026-11-23T08:53:44 ***", "cancelled"),
    ],
)
def test_slurms_own_line_says_who_ended_a_life_and_those_of_lives_before_dont(slurm, tmp_path, line, verdict):
    one = job(tmp_path, starter="srun", nodes=1, devices=1)
    log = Path(one.folder) / "job-12345.out"
    log.write_text("slurmstepd-n: error: *** JOB 12345 ON n CANCELLED AT 2026-11-23T08:00:00 ***\n")
    program = f"import sys\nwith open({str(log)!r}, 'a') as out: out.write({line!r} + chr(10))\nsys.exit(1)\n"
    (Path(one.folder) / "program.py").write_text(program)
    done = run_script(one, STATE="COMPLETING")
    assert f"life 0: {verdict}" in done.stdout
    assert (slurm / "scontrol.asked").read_text().count("requeue") == 0, "Slurm does that itself"


def test_a_task_that_a_node_cant_start_ends_the_others_and_is_told(slurm, tmp_path):
    one = job(tmp_path)
    log = Path(one.folder) / "job-12345.out"
    line = "srun: error: task 1 launch failed: Slurmd could not connect IO"
    (slurm / "srun").write_text(f"#!/bin/bash\necho '{line}' >>'{log}'; exec {shutil.which('sleep')} 600\n")
    each_sleep_lasts(slurm, 0.05)
    done = run_script(one)
    assert "life 0: failed" in done.stdout
    assert "could not connect IO" in history(Path(one.folder))[0]["message"]


def test_a_life_that_another_has_followed_says_nothing_more(slurm, tmp_path):
    one = job(tmp_path, starter="srun", nodes=1, devices=1)
    later = Path(one.folder) / "lives" / "1"
    (Path(one.folder) / "program.py").write_text(f"import os, sys; os.makedirs({str(later)!r}); sys.exit(1)")
    done = run_script(one)
    assert done.returncode == 143 and "life 0:" not in done.stdout
    assert not (Path(one.folder) / "state.json").exists()
    assert "requeue" not in (slurm / "scontrol.asked").read_text()


def test_a_rank_ends_where_its_job_has_begun_another_life(tmp_path):
    life = tmp_path / "0"
    pid = os.fork()
    if pid == 0:
        end_with_a_later_life(life, look_seconds=0.02)
        time.sleep(60)
        os._exit(0)
    assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    (tmp_path / "1").mkdir()
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL


def test_ranks_that_slurm_ended_without_a_word_are_started_again_but_not_for_ever(tmp_path):
    line = "slurmstepd-n1: error: *** STEP 12.0 ON n1 CANCELLED AT 2026-11-22T15:29:52 ***\n"

    def write(folder, number):
        (life(folder, number, begun=number > 0) / "task-0.out").write_text(line)

    in_a_row(tmp_path, [*["again"] * (STALLED - 1), "failed"], write, code=143)


def test_a_rank_that_the_machine_killed_is_told_rather_than_what_followed_from_it(tmp_path):
    place = life(tmp_path, faults=[{"kind": "RuntimeError", "message": "Connection reset", "step": 5}])
    (place / "task-1.out").write_text(
        "Failures:\n  <NO_OTHER_FAILURES>\nRoot Cause (first observed failure):\n[0]:\n  rank      : 3 (local_rank: 1)\n"
        "  exitcode  : -9 (pid: 7)\n"
    )
    told = judge(tmp_path, life=0, code=1)
    assert "rank 3 was killed by SIGKILL" in told["message"] and (told["rank"], told["step"]) == (3, 5)


def trained(folder, number=0, *, lines=(), checkpoints=(), begun=True):
    """A life that left no word, in a job whose run has written these lines of metrics and these checkpoints."""
    place = life(folder, number, begun=begun)
    run = folder / "run"
    run.mkdir(exist_ok=True)
    (folder / "run_dir").write_text(str(run))
    if lines:
        (run / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    for step in checkpoints:
        written = run / "checkpoints" / f"step={step}"
        written.mkdir(parents=True, exist_ok=True)
        write_manifest(written, Manifest(step=step, consumed_samples=0, layout={}))
    return place


@pytest.mark.parametrize(
    ("lines", "checkpoints", "step", "words"),
    [
        ((), (), None, "SIGKILL|exit code 1"),
        ((), (5,), 5, "exit code 1"),
        (('{"step": 6}', '{"step": 7, "los', '{"step": 8}'), (5,), 5, "metrics.jsonl:2"),
        (('{"step": 6}', "[]", '{"step": 8}'), (), None, "metrics.jsonl:2"),
        (('{"step": "x"}',), (5,), 5, "exit code 1"),
        (("\0\0\0\0",), (5,), 5, "metrics.jsonl:1"),
    ],
    ids=["nothing logged", "a checkpoint", "torn", "no object", "no number", "zeros"],
)
def test_a_judge_that_cannot_tell_how_far_the_run_came_starts_it_again_within_a_limit(
    tmp_path, lines, checkpoints, step, words
):
    """Both ranks were killed before the first logged step, or a file of the run is damaged."""

    def write(folder, number):
        trained(folder, number, lines=lines, checkpoints=checkpoints)
        told = judge(folder, life=number, code=1)
        assert told["step"] == step and re.search(words, told["message"])

    in_a_row(tmp_path, [*["again"] * STALLED, "failed"], write)


def test_killed_lives_that_come_further_by_their_checkpoints_are_started_again(tmp_path):
    in_a_row(tmp_path, ["again"] * 3 * STALLED, lambda folder, at: trained(folder, at, checkpoints=(5 * at,)))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("state.json", "{"),
        ("state.json", "[]"),
        ("state.json", '{"lives": 3}'),
        ("state.json", '{"lives": [1, {"life": 0}]}'),
        ("run_dir", "\0"),
        ("lives/0/faults/rank-0.json", "\xff"),
        ("lives/0/faults/rank-0.json", "{}"),
        ("lives/0/faults/rank-0.stacks", "Timeout"),
        ("lives/0/faults/rank-0.heartbeat", "x"),
        ("lives/0/task-0.out", "\xff\udcff"),
        ("lives/0/faults", None),
        ("run_dir", None),
        ("lives/0/task-0.out", None),
    ],
)
def test_no_file_of_a_job_takes_its_verdict_along(slurm, tmp_path, name, content):
    """Written halfway, damaged, or a folder (None)."""
    one = job(tmp_path, starter="srun", nodes=1, devices=1)
    folder = Path(one.folder)
    file = f"pathlib.Path({str(folder)!r}, {name!r})"
    writes = (
        f"{file}.mkdir(exist_ok=True)"
        if content is None
        else f"{file}.write_bytes({content.encode(errors='replace')!r})"
    )
    (folder / "program.py").write_text(
        'import os, pathlib; life = pathlib.Path(os.environ["NEMO2_LIFE"]); (life / "rank-00000.out").touch()\n'
        f"{file}.parent.mkdir(exist_ok=True); {writes}\nraise SystemExit(3)"
    )
    done = run_script(one, SLURM_JOB_ID="7")
    assert "life 0: again" in done.stdout and "requeue" in (slurm / "scontrol.asked").read_text(), done.stderr


def test_a_job_whose_judge_cannot_run_starts_again_within_a_limit(slurm, tmp_path):
    one = job(tmp_path, starter="srun", nodes=1, devices=1)
    (Path(one.folder) / "program.py").write_text("raise SystemExit(3)")
    broken = tmp_path / "broken" / "nemo2"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('half installed')")
    verdicts = []
    for _ in range(MOST_UNJUDGED):
        done = run_script(one, SLURM_JOB_ID="7", PYTHONPATH=str(broken.parent))
        verdicts.append(re.findall(r"^life \d: (\w+)$", done.stdout, re.MULTILINE))
    assert verdicts == [*[["again"]] * (MOST_UNJUDGED - 1), ["failed"]]


def test_a_verdict_that_cannot_be_written_is_given_all_the_same(tmp_path, monkeypatch, capsys):
    trained(tmp_path)
    monkeypatch.setattr(job_result, "write_text", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    for number, verdict in ((0, "again"), (STALLED, "failed")):
        monkeypatch.setattr(sys, "argv", ["job_result", str(tmp_path), "--life", str(number), "--code", "1"])
        (tmp_path / "lives" / str(number)).mkdir(exist_ok=True)
        (tmp_path / "lives" / str(number) / "rank-00000.out").touch()
        job_result.main()
        assert capsys.readouterr().out.splitlines()[-1] == verdict


def test_an_error_of_the_judge_is_said_and_starts_the_run_again_within_a_limit(tmp_path, monkeypatch, capsys):
    def broken(*_, **__):
        raise RuntimeError("a b\nc")

    monkeypatch.setattr(job_result, "judge", broken)
    verdicts = []
    for number in range(STALLED):
        monkeypatch.setattr(sys, "argv", ["job_result", str(tmp_path), "--life", str(number), "--code", "1"])
        job_result.main()
        verdicts.append(capsys.readouterr().out.splitlines()[-1])
    assert verdicts == [*["again"] * (STALLED - 1), "failed"]
    assert "RuntimeError: a b c" in history(tmp_path)[0]["message"]


# ----------------------------------------------------------------------------------------------- from launch to the end


PROGRAM = '''
"""What the rank of the tests below does."""
import os
import signal
from pathlib import Path


def work(place: str):
    print("rank speaks", flush=True)
    Path(place).write_text(os.environ["ODD"] + os.environ["MY_TOKEN"])


def stops_twice(place: str):
    from nemo2.base.errors import Preempted
    from nemo2.training.run_dir.faults import record_fault

    lives = len(list(Path(os.environ["NEMO2_LIFE"]).parent.iterdir()))
    if lives < 3:
        error = Preempted(f"asked to, in life {lives}.")
        record_fault(error, step=lives)
        raise error
    Path(place).write_text(str(lives))


def wrong(place: str):
    from nemo2.base.errors import ConfigError

    raise ConfigError("a=1 is not 2")
'''


@pytest.fixture
def program(tmp_path, monkeypatch, slurm):
    (tmp_path / "slurm_program.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("slurm_program", None)
    import slurm_program  # pyright: ignore[reportMissingImports]

    yield slurm_program
    sys.modules.pop("slurm_program", None)


@pytest.fixture
def warm_program(program, tmp_path, monkeypatch, warm_interpreter):
    """`program` for ranks that are forks, which look for the user's modules where the variable says, and nowhere else."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return program


def executor(tmp_path, **fields):
    fields = {"account": "", "time": "30", "tunnel": nemo_run.LocalTunnel(job_dir=str(tmp_path / "jobs"))} | fields
    return nemo_run.SlurmExecutor(**fields)


def launched(task, on, **options):
    return launch(task, on, **{"devices": 1, "nodes": 1, "check": False, **options})


def test_a_job_runs_to_its_end_with_the_shipped_code_and_no_secret_in_anybodys_sight(program, tmp_path, capsys):
    task = Partial(program.work, place=str(tmp_path / "done"))
    variables = {"ODD": ODD, "MY_TOKEN": "canary-1f"}
    result = launched(task, executor(tmp_path), name="works", env=variables)
    assert (result.status, result.exit_code, result.jobs) == ("succeeded", 0, ("7",))
    assert (tmp_path / "done").read_text() == ODD + "canary-1f"
    assert result.log_dir is not None and (result.log_dir / "code" / "slurm_program.py").is_file()
    assert stat.S_IMODE(result.log_dir.stat().st_mode) == 0o700
    leaked = {path.name for path in (tmp_path / "jobs").rglob("*") if path.is_file() and b"canary" in path.read_bytes()}
    assert leaked == {"secrets.sh"}
    assert stat.S_IMODE((result.log_dir / "secrets.sh").stat().st_mode) == 0o600
    assert capsys.readouterr().out.count("rank speaks") == 1


def test_a_run_that_is_asked_to_stop_comes_back_by_itself_until_it_is_done(warm_program, tmp_path, monkeypatch, slurm):
    # What the recipe of a real run has; a function that trains nothing has no such field.
    monkeypatch.setattr("nemo2.launch.slurm.start._resumes", lambda recipe: True)
    task = Partial(warm_program.stops_twice, place=str(tmp_path / "done"))
    result = launched(task, executor(tmp_path), name="stops")
    assert result.status == "succeeded" and (tmp_path / "done").read_text() == "3"
    assert (slurm / "scontrol.asked").read_text().count("requeue 7") == 2


def test_a_wrong_setting_is_told_in_its_own_words_and_not_tried_again(warm_program, tmp_path, monkeypatch, slurm):
    monkeypatch.setattr("nemo2.launch.slurm.start._resumes", lambda recipe: True)
    with pytest.raises(
        RankFailure, match="rank 0 failed first: ConfigError: a=1 is not 2. Logs of all ranks: "
    ) as caught:
        launched(Partial(warm_program.wrong, place=""), executor(tmp_path), name="wrong")
    assert caught.value.rank == 0 and "requeue" not in (slurm / "scontrol.asked").read_text()


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("Invalid partition name specified", "sinfo -s"),
        ("Unable to contact slurm controller (connect failure)", "scontrol ping"),
        ("fatal: Could not establish a configuration source", "sinfo answers"),
    ],
)
def test_what_slurm_refuses_is_said_in_its_words_with_what_to_look_at(program, tmp_path, monkeypatch, words, advice):
    monkeypatch.setenv("REFUSES", words)
    with pytest.raises(ConfigError, match=f"{re.escape(words)}.*{advice}"):
        launched(Partial(program.wrong, place=""), executor(tmp_path), name="x")


@pytest.mark.parametrize("launcher", ["torchrun", None])
def test_a_dry_run_prints_a_script_that_can_be_pasted(program, tmp_path, capsys, monkeypatch, launcher):
    monkeypatch.setenv("COLUMNS", "20")
    task = Partial(program.work, place="x" * 200)
    on = executor(tmp_path, launcher=launcher)
    result = launched(task, on, name="dry", dryrun=True, env={"A": ODD})
    assert result.status == "dryrun" and not (tmp_path / "jobs").exists()
    text = capsys.readouterr().out
    assert text.startswith("#!/bin/bash\n#SBATCH --job-name=dry\n")
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


def test_a_chain_is_submitted_each_after_the_one_before_and_cancelled_where_it_isnt_needed(
    warm_program, tmp_path, slurm, monkeypatch
):
    monkeypatch.setenv("HELD", "1")
    task = Partial(warm_program.stops_twice, place=str(tmp_path / "done"))
    result = launched(task, executor(tmp_path), name="chain", detach=True, chain=3)
    folder = result.log_dir
    assert folder is not None and (folder / "chain").read_text().split() == ["7", "7", "7"]
    asked = (slurm / "sbatch.asked").read_text().splitlines()
    assert ["--dependency=afterany:7" in line for line in asked] == [False, True, True]
    (folder / "chain").write_text("7\n8\n9\n")
    env = {**os.environ, "SLURM_JOB_ID": "7"}
    codes = [
        subprocess.run(["bash", folder / SCRIPT], env=env, capture_output=True, check=False).returncode
        for _ in range(4)
    ]
    assert codes == [143, 143, 0, 0], "the last link finds the run done"
    assert (slurm / "scancel.asked").read_text() == "8 9\n" and "requeue" not in (slurm / "scontrol.asked").read_text()


def test_a_chain_of_which_slurm_refuses_a_link_leaves_no_job(program, tmp_path, slurm, monkeypatch):
    links = iter(["8", "9"])

    def submitted(shell, script, *, after=None):
        if (link := next(links, None)) is None:
            raise ConfigError("sbatch refuses the job")
        return link

    monkeypatch.setattr(queue, "submit", submitted)
    with pytest.raises(ConfigError, match="refuses"):
        launched(Partial(program.work, place=""), executor(tmp_path), chain=3)
    assert (slurm / "scancel.asked").read_text() == "8 9\n"


def test_a_chain_whose_jobs_would_each_begin_again_is_refused(tmp_path, slurm):
    recipe = llama_tiny.pretrain_recipe()
    recipe.resume.resume_if_exists = False
    with pytest.raises(ConfigError, match="chain=3: each job would train from the beginning"):
        launched(recipe, executor(tmp_path), name="again", chain=3, dryrun=True)


def job_of_executor(**fields):
    on = nemo_run.SlurmExecutor(
        **{"account": "a", "time": "", "tunnel": nemo_run.LocalTunnel(job_dir="/jobs"), **fields}
    )
    return job_of(on, ClusterSettings(), name="x", experiment_id="x_1", devices=2, nodes=1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"array": "0-3"}, "array"),
        ({"heterogeneous": True}, "heterogeneous"),
        ({"dependencies": ["slurm://a/1"]}, "dependency"),
        ({"signal": "B:USR1@60"}, "signal='B:USR1@60': with B, only"),
        ({"setup_lines": "if true; then"}, "setup_lines: Bash can't read them"),
        ({"setup_lines": "cat <<END"}, "setup_lines: Bash can't read them"),
        ({"setup_lines": "export A=1 \\"}, "ends with a backslash"),
        ({"additional_parameters": {"nodes": 4}}, r"additional_parameters\['nodes'\]=4 is not supported"),
        ({"additional_parameters": {"gpu_bind": "none"}}, "among the GPUs of its node"),
        ({"additional_parameters": {"output": "job.out"}}, "the script reads the job's output"),
        ({"additional_parameters": {"array": "0-3"}}, "the same run directory"),
        ({"additional_parameters": {"--reservation": "x"}}, "has no such option"),
    ],
)
def test_what_a_run_of_ranks_cant_have_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        job_of_executor(**fields)


def test_additional_options_are_written_as_sbatch_reads_them():
    options = {"nodelist": ["n1", "n2"], "mail_type": "END", "hold": True, "exclusive": False, "nice": 0}
    one = job_of_executor(additional_parameters=options)
    assert one.directives == {"account": "a", "nodelist": "n1,n2", "mail-type": "END", "hold": None, "nice": "0"}
    assert one.requeue
    for forbids in ({"no-requeue": None}, {"no_requeue": True}, {"requeue": False}):
        script = job_script(job_of_executor(additional_parameters=forbids))
        assert script.count("requeue\n") == 1 and "#SBATCH --no-requeue\n" in script
        assert "scontrol requeue" not in script


def test_settings_of_a_launcher_reach_the_script():
    script = job_script(job_of_executor(launcher=FaultTolerance(max_restarts=5, rdzv_port=12345)))
    assert "export PET_MAX_RESTARTS=5\n" in script and "\nMASTER_PORT=12345\n" in script
    script = job_script(job_of_executor(launcher="torchrun", env_vars={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}))
    assert script.count("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") == 1
    assert "#SBATCH --job-name=team-x\n" in job_script(job_of_executor(job_name_prefix="team-"))


def test_variables_of_the_user_win_over_the_images(tmp_path):
    """pyxis keeps the image's value of any other variable."""
    inside = {"container_image": "i", "container_env": ["HOME"], "env_vars": {"NCCL_DEBUG": "INFO", "HF_TOKEN": "x"}}
    assert job_script(job_of_executor(**inside)).count("--container-env=NCCL_DEBUG,HF_TOKEN,HOME") == 2
    assert "--container-env" not in job_script(job_of_executor(env_vars={"A": "1"}))


@pytest.mark.parametrize(
    ("requested_signal", "handled"), [("USR2@240", "SIGUSR2"), ("12@240", "SIGUSR2"), ("SIGUSR1@240", "SIGUSR1")]
)
def test_torchrun_survives_a_signal_of_the_ranks_and_leaves_them_the_time_to_save(
    tmp_path, slurm, capsys, requested_signal, handled
):
    recipe = llama_tiny.pretrain_recipe(dir="runs", name="x")
    on = executor(tmp_path, signal=requested_signal, launcher="torchrun", time="10:00")
    prepared, _ = prepare(requested(recipe, on), ClusterSettings())
    script = job_script(prepared)
    assert f"export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,{handled}\n" in script
    assert f"trap '\"'\"''\"'\"' {handled[3:]}\n" in script or f"trap '' {handled[3:]}" in script
    assert "export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240\n" in script
    assert ("no PreemptionCallback handles this signal" in capsys.readouterr().err) == (handled == "SIGUSR2")
    recipe.trainer.callbacks = [Config(PreemptionCallback, sig=handled)]
    prepare(requested(recipe, on), ClusterSettings())
    assert "no PreemptionCallback" not in capsys.readouterr().err
    plain = job_script(replace(prepared, early_signal="TERM"))
    assert "PET_SIGNALS_TO_HANDLE" not in plain and "PET_SIGNALS_TO_HANDLE" not in job_script(
        replace(prepared, starter="srun")
    )


def test_a_home_of_this_machine_is_none_of_a_cluster_over_ssh(slurm):
    far = nemo_run.SlurmExecutor(account="a", tunnel=nemo_run.SSHTunnel(host="h", user="u", job_dir="/jobs"))
    with pytest.raises(ConfigError, match=r"log\.log_dir=~/runs"):
        prepare(requested(llama_tiny.pretrain_recipe(dir="~/runs", name="x"), far), ClusterSettings())


def requested(recipe, on):
    shape = {"name": "x", "experiment_id": "x_1", "devices": 2, "nodes": 1}
    return LaunchRequest(recipe=recipe, executor=on, **shape)


def test_relative_directories_become_absolute_where_the_job_is_submitted(tmp_path, slurm):
    recipe = llama_tiny.pretrain_recipe(dir="my runs", name="x")
    prepare(requested(recipe, executor(tmp_path)), ClusterSettings())
    assert recipe.log.log_dir == f"{tmp_path}/my runs"


@pytest.mark.parametrize("code", ["tree", "none"])
def test_own_folders_are_on_the_path_of_ranks_as_copies_or_where_they_are(tmp_path, slurm, monkeypatch, code):
    cwd = tmp_path / "project"
    (cwd / "inside").mkdir(parents=True)
    monkeypatch.chdir(cwd)
    own = [str(cwd), str(cwd / "inside"), f"{cwd}-2"]
    monkeypatch.setattr("nemo2.launch.slurm.start.own_folders", lambda: own)
    request = requested(llama_tiny.pretrain_recipe(), executor(tmp_path))
    prepared, _ = prepare(request, ClusterSettings(code=code))
    copies = [f"{prepared.folder}/code", f"{prepared.folder}/code/inside", f"{cwd}-2"]
    assert prepared.variables["NEMO2_OWN_FOLDERS"].split(":") == (own if code == "none" else copies)


def test_a_container_sees_the_run_its_data_and_the_checkpoint_from_which_it_starts(tmp_path, slurm):
    recipe = llama_tiny.pretrain_recipe(dir=str(tmp_path / "runs"))
    recipe.data = Config(PreTrainingDataModule, paths=[str(tmp_path / "texts" / "prefix")])
    recipe.resume.resume_from_path = str(tmp_path / "checkpoint")
    (tmp_path / "checkpoint").mkdir()
    prepared, _ = prepare(requested(recipe, executor(tmp_path, container_image="i")), ClusterSettings())
    folders = [f"{tmp_path}/{name}" for name in ("runs", "texts", "checkpoint")]
    assert list(prepared.container_mounts) == [f"{folder}:{folder}" for folder in folders]


def test_no_job_has_secrets_in_its_script(tmp_path):
    on = executor(tmp_path, env_vars={"HF_TOKEN": "canary", "NCCL_DEBUG": "INFO"})
    job = job_of(on, ClusterSettings(), name="x", experiment_id="x_1", devices=1, nodes=2)  # as of `nemo2 cluster test`
    assert "canary" not in job_script(job) and "export NCCL_DEBUG=INFO" in job_script(job)


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("30", 1800),
        ("1:30", 90),
        ("02:00:00", 7200),
        ("1-12", 129600),
        ("2-01:00:30", 176430),
        ("", None),
        ("UNLIMITED", None),
    ],
)
def test_slurms_forms_of_time(limit, seconds):
    assert limit_seconds(limit) == seconds


def test_a_run_is_asked_to_save_as_long_before_the_end_as_its_checkpoint_takes():
    # Without the embedding's rows, whose number a recipe's config doesn't know.
    tiny, large = llama_tiny.pretrain_recipe(), llama3_70b.pretrain_recipe()
    assert _grace(tiny, ClusterSettings(), nodes=1, limit=None) == 60
    # 70.6e9 parameters of 14 bytes, on 8 nodes of half a GB per second
    assert _grace(large, ClusterSettings(), nodes=8, limit=None) == pytest.approx(
        60 + 70.6e9 * 14 / 8 / 0.5e9, rel=0.05
    )
    assert _grace(large, ClusterSettings(), nodes=8, limit=400) == 100
    assert _grace(large, ClusterSettings(grace_seconds=5), nodes=8, limit=None) == 5
    assert _grace(large, ClusterSettings(), nodes=1, limit=10**6) == pytest.approx(2040, rel=0.05)


@pytest.mark.parametrize(("limit", "most"), [(None, 3600), (1200, 300)])
def test_a_time_to_save_that_is_cut_is_told(limit, most, capsys):
    assert _grace(llama_tiny.pretrain_recipe(), ClusterSettings(grace_seconds=7200), nodes=1, limit=limit) == most
    assert f"grace_seconds=7200 becomes {most}, " in capsys.readouterr().err


def test_a_signal_that_would_come_at_the_start_is_refused_and_too_few_cpus_are_told(program, tmp_path, slurm, capsys):
    def dry(**fields):
        on = executor(tmp_path)
        for name, value in fields.items():
            setattr(on, name, value)
        launch(Partial(program.work, place=""), on, devices=4, nodes=1, check=False, dryrun=True)

    with pytest.raises(ConfigError, match="signal='TERM@1800': at a time limit of 1800 s"):
        dry(signal="TERM@1800", time="30")
    dry(launcher="torchrun", cpus_per_task=3)
    assert "cpus_per_task=3 is for all 4 ranks of a node" in capsys.readouterr().err
    dry(launcher="torchrun", cpus_per_task=4)
    dry(launcher=None, cpus_per_task=3)
    assert "cpus_per_task" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("packager", "words"),
    [
        (nemo_run.PatternPackager(include_pattern="no/*.py", relative_path="."), "PatternPackager packs no file"),
        (
            nemo_run.PatternPackager(include_pattern=["a", "b"], relative_path="."),
            "PatternPackager fails: .*same length",
        ),
        (nemo_run.HybridPackager(sub_packagers={"a": nemo_run.Packager()}), "HybridPackager fails"),
        (nemo_run.HybridPackager(), "HybridPackager packs no file"),
        (nemo_run.GitArchivePackager(ref="nowhere"), "GitArchivePackager fails"),
    ],
)
def test_a_packager_that_fails_or_packs_nothing_is_refused(packager, words, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())  # which nemo-run's packagers read
    with pytest.raises(ConfigError, match=words):
        ship.ship(tmp_path, tmp_path / "job" / "code", packager=packager)


def test_nemo_runs_own_packager_packs_nothing(tmp_path):
    ship.ship(tmp_path, tmp_path / "job" / "code", packager=nemo_run.Packager())
    assert not any((tmp_path / "job" / "code").iterdir())


# ------------------------------------------------------------------------------------------------------ queue, code, probe


class Answers:
    """A shell whose answers are written down: by the first word of a command."""

    local = True

    def __init__(self, **answers):
        self.answers = answers

    def run(self, command):
        return self.answers.get(command.split()[0], (0, "", ""))

    def place(self, source, target):
        raise AssertionError


def test_states_are_known_with_accounting_and_without():
    none = (1, "", "Slurm accounting storage is disabled")
    assert queue.state(Answers(squeue=(0, "RUNNING\n", ""), sacct=none), "7") == "RUNNING"
    forgotten = (1, "", "slurm_load_jobs error: Invalid job id specified")
    assert queue.state(Answers(squeue=forgotten, sacct=none), "7") == "UNKNOWN"
    assert queue.state(Answers(squeue=forgotten, sacct=(0, "CANCELLED by 0\n", "")), "7") == "CANCELLED"
    with pytest.raises(Exception, match="scontrol.*DOWN"):
        queue.state(Answers(squeue=(1, "", "Unable to contact"), scontrol=(1, "", "DOWN")), "7")


def test_a_job_that_slurm_holds_is_told_with_what_releases_it():
    held = Answers(squeue=(0, "launch failed requeued held\n", ""))
    assert queue.with_hold(held, "7", "PENDING") == (
        "PENDING, held (launch failed requeued held): `scontrol release 7` releases it"
    )
    assert queue.with_hold(Answers(squeue=(0, "Priority\n", "")), "7", "PENDING") == "PENDING"
    assert queue.with_hold(held, "7", "RUNNING") == "RUNNING"


def test_a_full_disk_is_told_as_one(tmp_path, monkeypatch):
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "file").write_text("x")

    def full(source, target, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

    monkeypatch.setattr(shutil, "copystat", full)
    with pytest.raises(
        RuntimeFault, match=r"/there/job can't be written: .*No space left.*The disk is full: make room"
    ):
        LocalShell().place(tmp_path / "job", str(tmp_path / "there" / "job"))


def test_a_growing_file_is_read_line_by_line_through_a_shell(tmp_path):
    file = tmp_path / "a b"
    lines = RemoteLines(LocalShell(), str(file))
    assert lines.read() == []
    file.write_text("één\nha")
    assert lines.read() == ["één"]
    file.write_text("één\nhalf\n\nbar 1\rbar 2\n")
    assert lines.read() == ["half", "", "bar 2"]
    with open(file, "ab") as more:
        more.write(b"\xff\xfe bytes\nthe next\n\xff")
    assert lines.read() == ["\ufffd\ufffd bytes", "the next"]
    with open(file, "ab") as more:
        more.write(b" line\n")
    assert lines.read() == ["\ufffd line"]


def test_the_tree_is_shipped_as_it_is_or_the_commit(tmp_path):
    source = tmp_path / "src"
    (source / "pkg").mkdir(parents=True)
    (source / "pkg" / "a.py").write_text("1")
    (source / ".hidden").write_text("x")
    (source / "__pycache__").mkdir()
    (source / "__pycache__" / "a.pyc").write_text("x")
    assert ship.ship(source, tmp_path / "one" / "code")["files"] == 1
    assert (tmp_path / "one" / "code" / "pkg" / "a.py").read_text() == "1"
    with pytest.raises(ConfigError, match="not in a git repository"):
        ship.ship(source, tmp_path / "two" / "code", code="commit")
    git = ["git", "-C", str(source), "-c", "user.name=n", "-c", "user.email=e@x"]
    for arguments in (["init", "-q"], ["add", "pkg"], ["commit", "-qm", "m"]):
        subprocess.run([*git, *arguments], check=True)
    (source / "pkg" / "a.py").write_text("2")
    (source / "new.py").write_text("3")
    (source / ".gitignore").write_text("data\n__pycache__\n")
    (source / "data").write_text("large")
    told = ship.ship(source, tmp_path / "three" / "code")
    assert (tmp_path / "three" / "code" / "pkg" / "a.py").read_text() == "2"
    assert (tmp_path / "three" / "code" / "new.py").is_file() and not (tmp_path / "three" / "code" / "data").exists()
    assert told["commit"] and "pkg/a.py" in told["changed"]
    ship.ship(source, tmp_path / "four" / "code", code="commit")
    assert (tmp_path / "four" / "code" / "pkg" / "a.py").read_text() == "1"
    assert not (tmp_path / "four" / "code" / "new.py").exists()


@pytest.mark.parametrize("repository", [False, True])
def test_what_launches_have_written_below_the_working_directory_is_not_shipped(tmp_path, monkeypatch, repository):
    """Each launch copied all launches before it: 2 files, 55, 149, 350, 783, 1,618."""
    source = tmp_path / "src"
    (source / "pkg").mkdir(parents=True)
    (source / "pkg" / "recipe.json").write_text("{}")
    (source / "train.py").write_text("1")
    if repository:
        subprocess.run(["git", "-C", str(source), "init", "-q"], check=True)
    monkeypatch.setattr(ship, "MOST_FILES", 20)
    shipped = []
    for number in range(4):
        job_folder = source / "jobs" / "tiny" / f"tiny_{number}"
        job_folder.mkdir(parents=True)
        shipped.append(ship.ship(source, job_folder / "code", leave_out=[source / "nemo_run"])["files"])
        (job_folder / SCRIPT).write_text("")
        run = source / "runs" / "tiny" / str(number)
        written = [job_folder / "lives" / "0" / "rank-00000.out", job_folder / "config", source / "nemo_run" / "x.json"]
        written += [run / "environment.json", run / "metrics.jsonl", run / "checkpoints" / "step=1" / "weights" / "a"]
        written += [source / "elsewhere" / f"step={number}" / name for name in ("manifest.json", "weights/shard")]
        for file in written:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("x")
        for rest in range(10):
            (run / f"more-{rest}").write_text("x")
    assert shipped == [2] * 4
    if repository:  # what git tracks is the user's own decision
        subprocess.run(["git", "-C", str(source), "add", "runs/tiny/0/metrics.jsonl"], check=True)
        assert ship.ship(source, tmp_path / "last" / "code")["files"] == 3 + len(list((source / "nemo_run").iterdir()))


def test_a_folder_that_holds_too_much_is_not_copied_for_every_launch(tmp_path, monkeypatch):
    monkeypatch.setattr(ship, "MOST_FILES", 3)
    for number in range(5):
        (tmp_path / f"f{number}").write_text("x")
    with pytest.raises(ConfigError, match='code = "none"'):
        ship.ship(tmp_path, tmp_path.parent / "target" / "code")


def probed(rank, **changes):
    versions = {"nemo2": "1", "torch": "2"}
    data = {
        "rank": rank,
        "host": f"n{rank}",
        "addresses": [f"10.0.0.{rank}"],
        "time": 100.0,
        "python": "3.11",
        "sum": 2,
        "gpus": 2,
        "cuda": "13.0",
    }
    data |= {"versions": versions, "sees_folder": True, "token": "t", "free_gb": 50.0} | changes
    return "probe " + json.dumps(data)


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({"sees_folder": False, "token": None}, "n1 sees nothing there.*not shared"),
        ({"token": "other"}, "n1 sees another folder"),
        ({"addresses": ["10.0.0.1", "127.0.1.1"]}, "n1: its own name resolves to 127.0.1.1"),
        ({"versions": {"nemo2": "1", "torch": "3"}}, "torch is 3 on n1 and 2 on n0"),
        ({"versions": {"nemo2": None, "torch": "2"}}, "n1: python3 has no nemo2"),
        ({"time": 400.0}, "clock of n1 is .300 s off"),
        ({"free_gb": 0.01}, "n1: 0.01 GB are free"),
        ({"sum": None, "error": "DistNetworkError: refused"}, "add up.*DistNetworkError"),
        ({"gpus": 0, "no_gpu": "The NVIDIA driver is too old"}, "n1: .*CUDA 13.0 sees 0 of 2 GPUs .*driver is too old"),
        ({"gpus": 1}, "n1: .*sees 1 of 2 GPUs .*gpus_per_node"),
    ],
)
def test_each_defect_of_a_node_is_named(second, words):
    text = "\n".join(["noise", f"0: {probed(0)}", probed(1, **second)])
    found = [one.message for one in probing.judge(text, nodes=2, token="t", python="python3", folder="/jobs/x", gpus=2)]
    assert len(found) == 1
    assert re.search(words, found[0], re.DOTALL), found


def test_a_cluster_without_fault_has_no_findings_and_a_silent_node_is_said():
    both = f"{probed(0)}\n{probed(1)}"
    assert not list(probing.judge(both, nodes=2, token="t", python="python3", folder="/j"))
    text = f"{probed(0, sum=1)}\nbash: line 1: /opt/python: No such file or directory\n"
    found = [one.message for one in probing.judge(text, nodes=2, token="t", python="/opt/python", folder="/j")]
    assert "1 of 2 nodes reported nothing" in found[0] and "/opt/python does not exist there" in found[0]


@pytest.mark.parametrize(
    ("fields", "settings", "gpus"),
    [
        ({"gpus_per_node": 8}, {}, 8),
        ({"gres": "gpu:a100:4"}, {}, 1),
        ({"gpus_per_task": 1}, {}, 1),
        ({}, {"gpu": "H100"}, 1),
        ({"gres": "craynetwork:1"}, {}, 0),
    ],
)
def test_gpus_that_a_profile_promises_are_looked_for(fields, settings, gpus):
    executor = nemo_run.SlurmExecutor(account="", **fields)
    assert probing.gpus_of(executor, ClusterSettings(**settings)) == gpus


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_launch_that_follows_can_be_left_and_the_run_goes_on(slurm, tmp_path, warm_interpreter, number, code):
    (slurm / "pid").write_text(str(os.getpid()))  # the job runs as long as this process
    (tmp_path / "program.py").write_text(
        textwrap.dedent("""
            import os, sys
            import nemo_run
            from nemo2.config import Partial
            from nemo2.launch import launch
            if __name__ == "__main__":
                # The warm interpreter has imported nemo_run, and with it the home of an earlier moment.
                nemo_run.config.set_nemorun_home(os.environ["NEMORUN_HOME"])
                tunnel = nemo_run.LocalTunnel(job_dir=sys.argv[1])
                executor = nemo_run.SlurmExecutor(account="", time="30", tunnel=tunnel)
                try:
                    launch(Partial(print), executor, devices=1, nodes=1, name="stays", check=False)
                except KeyboardInterrupt:
                    sys.exit(130)
        """).replace("Partial(print)", "Partial(nemo_run.help)")
    )
    command = [sys.executable, "program.py", str(tmp_path / "jobs")]
    env = {**os.environ, "HELD": "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        while "job 7 is RUNNING" not in (line := process.stdout.readline()):
            assert line, process.communicate()[1]
        process.send_signal(number)
        _, said = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == code
    assert number != signal.SIGINT or "The run continues. `scancel 7` saves and ends it" in said
    assert not (slurm / "scancel.asked").exists()
    assert len(list((tmp_path / "home" / "nemo2" / "jobs").iterdir())) == 1  # and none in the user's own


@pytest.mark.parametrize("verbose", [False, True])
def test_a_connection_over_ssh_is_told_in_the_log_and_not_among_answers(verbose, monkeypatch, capsys, caplog):
    monkeypatch.setenv("NEMO2_VERBOSE", "1") if verbose else monkeypatch.delenv("NEMO2_VERBOSE", raising=False)
    tunnel = nemo_run.SSHTunnel(job_dir="", host="127.0.0.1", user="nobody", port=1)
    with caplog.at_level("INFO", logger="nemo2"), pytest.raises(RuntimeFault, match=r"ssh nobody@127.0.0.1 failed"):
        shell_of(tunnel).run("true")
    told = capsys.readouterr()
    assert told.out == "" and ("Connecting to nobody@127.0.0.1" in told.err) is verbose
    assert "Connecting to nobody@127.0.0.1" in caplog.messages
