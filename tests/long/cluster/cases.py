# SPDX-License-Identifier: Apache-2.0
"""The test cases on the cluster. A case returns the problems that it found, and logs its actions and measurements."""

import contextlib
import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

from support import tuned_runs
from support.small_chats import say, write_lines
from tests.long.cluster.defects import defects, no_accounting
from tests.long.cluster.overhead import overhead
from tests.long.cluster.runs import Cluster, Run

ROOT = Path(__file__).resolve().parents[3]
KNOWN_STEPS = 40
"""The losses of the undisturbed runs, with which other runs are compared step by step."""
SLURMD_TIMEOUT = 20.0
"""`cluster.sh`'s: after so many seconds without an answer a node is lost."""
LOADER_WORKERS = ["data.num_workers=2"]
"""A signal to a rank's processes reaches its workers too."""
BOOT_SECONDS = 75
"""A machine takes as long to come back. The controller ends the first life's step on a node that is back at once."""


class Curves:
    """Losses of undisturbed runs on this machine without Slurm, by tensor parallelism; made when they are first asked for."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._known: dict[int, list[float]] = {}
        self.step_seconds = 0.5

    def of(self, tp: int = 1) -> list[float]:
        if tp not in self._known:
            local = Run(
                self._cluster, f"local-tp{tp}", steps=KNOWN_STEPS, tp=tp, nodes=1, devices=2, executor="local"
            ).here()
            self._known[tp] = local.curve()
            assert len(self._known[tp]) == KNOWN_STEPS
            self.step_seconds = local.step_seconds() or self.step_seconds
        return self._known[tp]


Case = Callable[[Cluster, Curves, int, list[str]], list[str]]
CASES: dict[str, Case] = {}
DEFAULT: list[str] = []
"""The cases of `make cluster`, which take a quarter of an hour."""


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    DEFAULT.append(function.__name__)
    return function


def long_case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def _undisturbed(
    cluster: Cluster, curves: Curves, name: str, told: list[str], *, tp: int = 1, **options: Any
) -> list[str]:
    curve = curves.of(tp)
    run = Run(cluster, name, steps=16, tp=tp, **options).submit().wait_for_end()
    told.append(f"16 losses equal to a local run's, the last {run.curve()[-1]:.7f}" if run.curve() else "no step")
    return run.problems(curve=curve, lives=1)


@case
def torchrun_dp2(cluster: Cluster, curves: Curves, times: int, told: list[str]) -> list[str]:
    return _undisturbed(cluster, curves, "dp-torchrun", told)


@case
def srun_tp2(cluster: Cluster, curves: Curves, times: int, told: list[str]) -> list[str]:
    return _undisturbed(cluster, curves, "tp-srun", told, profile={"starter": "srun"}, tp=2)


@case
def tutorial(cluster: Cluster, curves: Curves, times: int, told: list[str]) -> list[str]:
    """The page of the documentation, with its steps on Slurm."""
    place, tests = cluster.folder / "page", ROOT / "tests/docs/snippets.py"
    place.mkdir()
    page = str(ROOT / "docs/tutorials/slurm.md")
    told.append(cluster.run(sys.executable, str(tests), page, cwd=place, HOME=str(place), PYTHONPATH=str(ROOT)).strip())
    return []


@long_case
def srun_dp2(cluster: Cluster, curves: Curves, times: int, told: list[str]) -> list[str]:
    return _undisturbed(cluster, curves, "dp-srun", told, profile={"starter": "srun"})


@long_case
def torchrun_tp2(cluster: Cluster, curves: Curves, times: int, told: list[str]) -> list[str]:
    return _undisturbed(cluster, curves, "tp-torchrun", told, tp=2)


@long_case
def gpus_per_task(cluster: Cluster, curves: Curves, times: int, told: list[str]) -> list[str]:
    """Ranks that srun starts see the GPUs of their node, as ranks of torchrun do."""
    run = Run(cluster, "gpus", steps=6, nodes=1, devices=2, profile={"starter": "srun", "gpus_per_task": 1})
    run.submit().wait_for_end()
    (file,) = (run.place / "runs" / run.name).glob("2*/environment.json")
    seen = json.loads(file.read_text())["environment"].get("CUDA_VISIBLE_DEVICES")
    told.append(f"CUDA_VISIBLE_DEVICES={seen}")
    return run.problems(lives=1) + ([] if seen == "0,1" else [f"rank 0 sees GPUs {seen}, not 0,1"])


@case
def over_ssh(cluster: Cluster, curves: Curves, times: int, told: list[str]) -> list[str]:
    """Submit from a machine outside the cluster."""
    said = dict(word.split("=", 1) for word in cluster.script("ssh").split())
    ssh = f'{{ host = "{said["host"]}", port = {said["port"]}, user = "{said["user"]}", identity = "{said["identity"]}" }}'
    env = f'{{ PYTHONPATH = "{ROOT}" }}'
    return _undisturbed(cluster, curves, "ssh", told, profile={"ssh": ssh, "python": sys.executable, "env": env})


def _disturbed(
    cluster: Cluster,
    curves: Curves,
    name: str,
    times: int,
    told: list[str],
    disturb: Callable[[Run], None],
    *,
    early: bool = True,
    **options: Any,
) -> list[str]:
    """A run that is disturbed ``times`` times, once per life, not counting lives that Slurm ends.

    Args:
        early: Whether a life may be disturbed before its first step: a third of them are.
    """
    curve = curves.of()
    run = Run(cluster, name, steps=14 * times + 10, **options).submit()
    beyond = 0
    for _ in range(times):
        life = max(run.lives() - 1, 0)
        run.wait_for_moment(life, early=early and random.random() < 1 / 3, beyond=beyond)
        beyond = max(run.logged_steps(), default=0) + 1
        disturb(run)
        run.wait_for_life(life + 1)
    run.wait_for_end()
    told += run.moments
    if ended := run.ended_by_slurm():
        told.append(f"{ended} more ended by Slurm")
    return run.problems(curve=curve, lives=times + 1 + ended)


@case
def requeued(cluster: Cluster, curves: Curves, times: int, told: list[str]) -> list[str]:
    def requeue(run: Run) -> None:
        cluster.run("scontrol", "requeue", run.jobs[0])

    return _disturbed(cluster, curves, "requeued", times, told, requeue)


@case
def preempted(cluster: Cluster, curves: Curves, times: int, told: list[str]) -> list[str]:
    def urgent(run: Run) -> None:
        options = ("--partition=urgent", "--nodes=2", "--exclusive", "--time=1", "--output=/dev/null")
        cluster.run("sbatch", *options, "--wrap=sleep 5")

    return _disturbed(cluster, curves, "preempted", times, told, urgent, profile={"starter": "srun"})


@long_case
def asked_to_save(cluster: Cluster, curves: Curves, times: int, told: list[str]) -> list[str]:
    """Send SIGTERM only to the ranks, as Slurm's ``--signal`` does."""

    def ask(run: Run) -> None:
        cluster.run("scancel", "--signal=TERM", run.jobs[0])

    return _disturbed(cluster, curves, "asked", times, told, ask, early=False, changes=LOADER_WORKERS)


@long_case
def out_of_time(cluster: Cluster, curves: Curves, times: int, told: list[str]) -> list[str]:
    """A time limit of two minutes. The run trains for as much of it as possible."""
    curve = curves.of()
    steps = min(int(70 * times / curves.step_seconds) + 30, 2000)
    run = Run(cluster, "time", steps=steps, profile={"time": "2"}, changes=LOADER_WORKERS).submit()
    run.wait_for_end(seconds=600.0 * (times + 1))
    told.append(f"{steps} steps in {run.lives()} lives")
    found = run.problems(curve=curve)
    return found + (["it was done within its time"] if run.lives() < 2 else [])


@case
def killed_rank(cluster: Cluster, curves: Curves, times: int, told: list[str]) -> list[str]:
    def kill(run: Run) -> None:
        os.kill(random.choice(cluster.ranks()), signal.SIGKILL)

    return _disturbed(cluster, curves, "killed", times, told, kill, early=False)


STRICT = "set -euo pipefail; set -o noclobber; shopt -s nullglob failglob"


@case
def strict_set_up(cluster: Cluster, curves: Curves, times: int, told: list[str]) -> list[str]:
    """A rank is killed under set-up lines that make the shell strict."""

    def kill(run: Run) -> None:
        os.kill(random.choice(cluster.ranks()), signal.SIGKILL)

    return _disturbed(cluster, curves, "strict", times, told, kill, early=False, profile={"setup_lines": STRICT})


@long_case
def failed_set_up(cluster: Cluster, curves: Curves, times: int, told: list[str]) -> list[str]:
    """Set-up lines that fail end the job at once, with their exit code."""
    run = Run(cluster, "set-up", steps=8, profile={"setup_lines": f"{STRICT}\nsource /no/such/file"}).submit()
    run.wait_for_end()
    words = json.dumps(run.verdicts())
    found = [] if "setup_lines ended with exit code 1" in words else [f"not its reason: {words}"]
    return found + run.problems(state="failed", lives=1)


@case
def killed_before_logging(cluster: Cluster, curves: Curves, times: int, told: list[str]) -> list[str]:
    """All ranks are killed at once after the first save, before a step is logged: nobody says how far the run came."""
    every = "trainer.log_every_n_steps=30"
    run = Run(cluster, "silent", steps=31, changes=[every, "log.ckpt.every_n_train_steps=2"]).submit()
    run.wait_for_checkpoint()
    for rank in cluster.ranks():
        os.kill(rank, signal.SIGKILL)
    run.wait_for_life(1)
    run.wait_for_end()
    known, own = curves.of(), run.curve()
    told.append(f"the logged loss is {own}")
    found = [] if own and own == [known[step] for step in run.logged_steps()] else [f"losses {own}"]
    if run.state() != "done" or run.lives() != 2:
        found.append(f"state {run.state()} after {run.lives()} lives: {json.dumps(run.verdicts())}")
    return found


@case
def killed_script(cluster: Cluster, curves: Curves, times: int, told: list[str]) -> list[str]:
    """The batch script itself is killed."""

    def kill(run: Run) -> None:
        os.kill(cluster.batch_script(), signal.SIGKILL)

    return _disturbed(cluster, curves, "script", times, told, kill, early=False)


@long_case
def killed_together(cluster: Cluster, curves: Curves, times: int, told: list[str]) -> list[str]:
    """The batch script and everything else of the job are killed: Slurm forgets the job, and its status says why."""
    run = Run(cluster, "together", steps=24).submit()
    run.wait_for_moment(0)
    for pid in [cluster.batch_script(), *cluster.processes()]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    run.wait_for_end()
    said = cluster.run(sys.executable, "-m", "nemo2", "runs", "status", run.name, cwd=run.place)
    found = [] if f"Slurm ended job {run.jobs[0]} in life 0" in said else [f"status says {said!r}"]
    told.append(cluster.run("scontrol", "show", "job", run.jobs[0], "--oneliner").split("JobState=")[1].split()[0])
    cluster.run("scontrol", "requeue", run.jobs[0])
    run.wait_for_life(1)
    run.wait_for_end()
    return found + run.problems(curve=curves.of(), lives=2)


@long_case
def shipped_tree(cluster: Cluster, curves: Curves, times: int, told: list[str]) -> list[str]:
    """Three launches of a working directory that holds the folders of jobs and runs: each ships the same files."""
    changes = ["log.ckpt.save_optim_on_train_end=True"]  # each launch trains on
    run = Run(cluster, "tree", steps=4, profile={"code": "tree"}, changes=changes)
    (run.place / "own.py").write_text("x = 1")
    shipped = []
    for steps in (4, 8, 12):
        run.command = [
            f"trainer.max_steps={steps}" if word.startswith("trainer.max_steps=") else word for word in run.command
        ]
        run.steps = steps
        run.submit().wait_for_end()
        shipped.append(json.loads((run.folder / "shipped.json").read_text())["files"])
    told.append(f"{shipped} files shipped")
    return ([] if shipped == [2] * 3 else [f"{shipped} files shipped"]) + run.problems()


def _wait_for_requeue(cluster: Cluster, run: Run, node: str) -> float:
    """Wait until the controller has queued the job again; seconds until it gave the node up."""
    job, lives, began = run.jobs[0], run.lives(), time.monotonic()
    cluster.wait_for(lambda: cluster.is_down(node), what=f"the loss of {node}")
    seconds = time.monotonic() - began
    cluster.wait_for(lambda: cluster.state(job) in ("PENDING", "") or run.lives() > lives, what="a requeue")
    return seconds


@long_case
def lost_node(cluster: Cluster, curves: Curves, times: int, told: list[str]) -> list[str]:
    """Lose one of the two nodes, which returns later."""

    def crash(run: Run) -> None:
        node = random.choice(cluster.hosts(run.jobs[0]))
        cluster.script("crash", node)
        run.moments[-1] += f", {node}"
        _wait_for_requeue(cluster, run, node)
        time.sleep(BOOT_SECONDS)
        cluster.script("start", node)

    return _disturbed(cluster, curves, "lost", times, told, crash)


def _without_its_node(
    cluster: Cluster, curves: Curves, name: str, told: list[str], *, take: str, give: str, starter: str = "torchrun"
) -> list[str]:
    """A run on one node, which is removed. The run continues on the other node at once."""
    curve = curves.of()
    # So many that a life which is cut off isn't done before its node is given up.
    steps = 30 + min(int(2 * SLURMD_TIMEOUT / curves.step_seconds), 200)
    run = Run(cluster, name, steps=steps, nodes=1, devices=2, profile={"starter": starter}).submit()
    run.wait_for_moment(0)
    node = cluster.hosts(run.jobs[0])[0]
    cluster.script(take, node)
    try:
        seconds = _wait_for_requeue(cluster, run, node)
        told += [*run.moments, f"{node}, noticed after {seconds:.0f} s"]
        run.wait_for_end()
        found = run.problems(curve=curve, lives=2)
    finally:
        if take == "crash":
            time.sleep(BOOT_SECONDS)
        cluster.script(give, node)
        cluster.wait_until_idle()
    return found + _late(seconds)


def _late(seconds: float) -> list[str]:
    # The controller asks its nodes every third of the time, and a machine at half its speed answers late.
    return [f"noticed after {seconds:.0f} s only"] if seconds > 3 * SLURMD_TIMEOUT else []


@long_case
def lost_only_node(cluster: Cluster, curves: Curves, times: int, told: list[str]) -> list[str]:
    found = []
    for number in range(times):
        found += _without_its_node(cluster, curves, f"only-{number}", told, take="crash", give="start", starter="srun")
    return found


@case
def unplugged_only_node(cluster: Cluster, curves: Curves, times: int, told: list[str]) -> list[str]:
    """Cut the run's only node off the network. Its processes keep running, keep the shared disk, and don't notice."""
    found = []
    for number in range(times):
        found += _without_its_node(cluster, curves, f"unplugged-{number}", told, take="unplug", give="plug")
    return found


@long_case
def unplugged_node(cluster: Cluster, curves: Curves, times: int, told: list[str]) -> list[str]:
    """Cut off one of the two nodes without closing its connections."""
    found: list[str] = []

    def unplug(run: Run) -> None:
        hosts = cluster.hosts(run.jobs[0])
        node = random.choice(hosts)
        cluster.script("unplug", node)
        seconds = _wait_for_requeue(cluster, run, node)
        found.extend(_late(seconds))
        run.moments[-1] += f", {node}, noticed after {seconds:.0f} s"
        time.sleep(BOOT_SECONDS)
        if node == hosts[0]:  # with the job's script still on it, Slurm would drain it and hold the job: it boots
            cluster.script("crash", node)
        cluster.script("plug", node)
        if node == hosts[0]:
            cluster.script("start", node)

    return _disturbed(cluster, curves, "unplugged", times, told, unplug) + found


@case
def cancelled(cluster: Cluster, curves: Curves, times: int, told: list[str]) -> list[str]:
    """A cancelled run saves and isn't restarted. The same command resumes it."""
    found: list[str] = []
    run = Run(cluster, "cancelled", steps=14 * times + 10)
    for _ in range(times):
        run.submit().wait_for_moment(0)
        cluster.run("scancel", run.jobs[0])
        run.wait_for_end()
        found += run.problems(state="cancelled", lives=1)
    run.submit().wait_for_end()
    told += run.moments
    return found + run.problems(curve=curves.of())


@long_case
def chain(cluster: Cluster, curves: Curves, times: int, told: list[str]) -> list[str]:
    """Three links, the first asked to stop: the second ends the run, the third is cancelled."""
    run = Run(cluster, "chain", steps=24, profile={"starter": "srun"}, chain="3").submit()
    run.wait_for_moment(0)
    cluster.run("scancel", "--signal=TERM", run.jobs[0])
    run.wait_for_end()
    told += run.moments
    return run.problems(curve=curves.of(), lives=2)


@long_case
def chain_of_lora(cluster: Cluster, curves: Curves, times: int, told: list[str]) -> list[str]:
    """LoRA from a released folder on chats, in three links, the first of which is killed after its first save."""
    folder = cluster.folder / "weights"
    tuned_runs.write_release(folder)
    chats = [say(("user", f"{number}?"), ("assistant", f"{number}!")) for number in range(64)]
    options: dict[str, Any] = {
        "from": f"hf://{folder}",
        "data": str(write_lines(cluster.folder / "chats.jsonl", chats)),
        "peft": "lora",
    }
    options |= {"steps": 24, "verb": "finetune"}
    whole = Run(cluster, "lora-local", nodes=1, devices=2, executor="local", **options).here()
    run = Run(cluster, "lora-chain", profile={"starter": "srun"}, chain="3", **options).submit()
    run.wait_for_checkpoint()
    os.kill(random.choice(cluster.ranks()), signal.SIGKILL)
    run.moments.append(f"killed after step {max(run.logged_steps()) + 1}")
    run.wait_for_end()
    told += run.moments
    return run.problems(curve=whole.curve())


@case
def two_at_once(cluster: Cluster, curves: Curves, times: int, told: list[str]) -> list[str]:
    """Two runs at once on the same two nodes."""
    runs = [Run(cluster, f"beside-{number}", steps=8).submit() for number in range(2)]
    for run in runs:
        run.wait_for_end()
    return [problem for run in runs for problem in run.problems(curve=curves.of(), lives=1)]


@long_case
def wrong_setting(cluster: Cluster, curves: Curves, times: int, told: list[str]) -> list[str]:
    """A wrong setting isn't retried, and is reported once."""
    run = Run(cluster, "wrong", steps=8, changes=["data.directory=/dev/null/nowhere"]).submit().wait_for_end()
    return run.problems(state="failed", lives=1)


ODD = "a b; $(touch ran) `touch ran` 'q' \"d\" \\ %s $HOME\nnew line"
"""It would run something, were it read as anything but text."""


@case
def odd_values(cluster: Cluster, curves: Curves, times: int, told: list[str]) -> list[str]:
    """Unusual values in variables, paths and Slurm's own fields. Unusual names are refused."""
    profile = {"comment": "a b; $(touch ran) `touch ran` 'q'", "env": f"{{ ODD = {_toml(ODD)} }}"}
    name = "odd; $(touch ran) 'q' `touch ran`"
    run = Run(cluster, name, title="odd", steps=12, profile=profile).submit()
    run.wait_for_moment(0, within=2)
    arrived = [_variable(pid, "ODD") for pid in cluster.ranks()]
    comment = re.search(r"Comment=(.*)", cluster.run("scontrol", "show", "job", run.jobs[0]))
    run.wait_for_end()
    found = run.problems(curve=curves.of(), lives=1)
    if set(arrived) != {ODD}:
        found.append(f"variables: {arrived}")
    if comment is None or comment[1].strip() != profile["comment"]:
        found.append(f"comment: {comment and comment[1]}")
    if ran := [str(file) for file in [*cluster.folder.rglob("ran"), *Path().glob("ran")]]:
        found.append(f"run: {ran}")
    said = cluster.run(*run.command, "--name", ODD, check=False, cwd=run.place)
    return found + ([] if "is not a valid directory name" in said else [f"as a name: {said}"])


def _toml(text: str) -> str:
    return json.dumps(text)


def _variable(pid: int, name: str) -> Optional[str]:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    except OSError:
        return None
    return dict(one.partition("=")[::2] for one in variables if one).get(name)


@case
def without_accounting(cluster: Cluster, curves: Curves, times: int, told: list[str]) -> list[str]:
    with Cluster(accounting=False) as other:

        def requeue(run: Run) -> None:
            other.run("scontrol", "requeue", run.jobs[0])

        found = _disturbed(other, curves, "unaccounted", 1, told, requeue)
        return found + no_accounting(other)


@case
def ten_defects(cluster: Cluster, curves: Curves, times: int, told: list[str]) -> list[str]:
    return defects(cluster, told)


@long_case
def time_to_first_step(cluster: Cluster, curves: Curves, times: int, told: list[str]) -> list[str]:
    return overhead(cluster, told, times=times)
