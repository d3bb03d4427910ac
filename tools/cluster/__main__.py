# SPDX-License-Identifier: Apache-2.0
"""Runs on a real Slurm of two nodes, disturbed in every way that jobs are: ``python -m tools.cluster [--only CASE] [--times N]``.

Needs root and Debian's packages (``tools/cluster/cluster.sh packages``). Each disturbed run has to be done by itself, with the
loss of an undisturbed one, no step twice, one run directory, and nothing left in the queue or on a node.
"""

import argparse
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.cluster.runs import Cluster, Run

STEPS, BEFORE = 24, 5
Case = Callable[[Cluster, dict[str, float]], list[str]]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def _undisturbed(cluster: Cluster, losses: dict[str, float], name: str, **options: Any) -> list[str]:
    run = Run(cluster, name, steps=STEPS, **options).submit()
    run.wait_for_end()
    key = f"tp{options.get('tp', 1)}"
    if run.steps_told():
        losses.setdefault(key, run.loss())
    return run.problems(loss=losses.get(key))


@case
def torchrun_dp2(cluster: Cluster, losses: dict[str, float]) -> list[str]:
    return _undisturbed(cluster, losses, "dp-torchrun", profile={})


@case
def srun_dp2(cluster: Cluster, losses: dict[str, float]) -> list[str]:
    return _undisturbed(cluster, losses, "dp-srun", profile={"starter": "srun"})


@case
def torchrun_tp2(cluster: Cluster, losses: dict[str, float]) -> list[str]:
    return _undisturbed(cluster, losses, "tp-torchrun", profile={}, tp=2)


@case
def over_ssh(cluster: Cluster, losses: dict[str, float]) -> list[str]:
    """Submitted from a machine that is none of the cluster's."""
    told = dict(word.split("=", 1) for word in cluster.script("ssh").split())
    ssh = f'{{ host = "{told["host"]}", port = {told["port"]}, user = "{told["user"]}", identity = "{told["identity"]}" }}'
    root = Path(__file__).resolve().parents[2]
    env = f'{{ PYTHONPATH = "{root}" }}'
    return _undisturbed(cluster, losses, "ssh", profile={"ssh": ssh, "python": sys.executable, "env": env})


def _disturbed(
    cluster: Cluster, losses: dict[str, float], name: str, disturb: Callable[[Run], None], **options: Any
) -> list[str]:
    run = Run(cluster, name, steps=STEPS, **{"profile": {}, **options}).submit()
    run.wait_for_step(BEFORE)
    disturb(run)
    run.wait_for_end()
    return run.problems(loss=losses.get("tp1"), lives=2)


@case
def requeued(cluster: Cluster, losses: dict[str, float]) -> list[str]:
    return _disturbed(
        cluster, losses, "requeued", lambda run: print(cluster.run("scontrol", "requeue", run.jobs[0]), end="")
    )


@case
def preempted(cluster: Cluster, losses: dict[str, float]) -> list[str]:
    def urgent(run: Run) -> None:
        cluster.run(
            "sbatch",
            "--partition=urgent",
            "--nodes=2",
            "--exclusive",
            "--time=1",
            "--output=/dev/null",
            "--wrap=sleep 5",
        )

    return _disturbed(cluster, losses, "preempted", urgent, profile={"starter": "srun"})


@case
def out_of_time(cluster: Cluster, losses: dict[str, float]) -> list[str]:
    """As Slurm's ``--signal`` does a minute before the end: SIGTERM to the step, and the job is still running."""
    return _disturbed(
        cluster, losses, "time", lambda run: print(cluster.run("scancel", "--signal=TERM", run.jobs[0]), end="")
    )


@case
def killed_rank(cluster: Cluster, losses: dict[str, float]) -> list[str]:
    return _disturbed(cluster, losses, "killed", lambda run: os.kill(cluster.ranks()[-1], signal.SIGKILL))


@case
def lost_node(cluster: Cluster, losses: dict[str, float]) -> list[str]:
    def crash(run: Run) -> None:
        cluster.script("crash", "node2")
        while "PENDING" not in cluster.run("squeue", "--noheader", f"--jobs={run.jobs[0]}", "--format=%T"):
            time.sleep(1)
        time.sleep(
            75
        )  # as a machine that boots does: the controller ends the first life's step on a node that is back at once
        cluster.script("start", "node2")

    return _disturbed(cluster, losses, "crash", crash)


@case
def cancelled(cluster: Cluster, losses: dict[str, float]) -> list[str]:
    """A cancelled run saves and doesn't come back; the same command goes on with it."""
    run = Run(cluster, "cancelled", steps=STEPS, profile={}).submit()
    run.wait_for_step(BEFORE)
    cluster.run("scancel", run.jobs[0])
    run.wait_for_end()
    found = run.problems(state="cancelled")
    run.submit().wait_for_end()
    return found + run.problems(loss=losses.get("tp1"))


@case
def chain(cluster: Cluster, losses: dict[str, float]) -> list[str]:
    """Three links, the first asked to stop: the second ends the run, the third is cancelled."""
    run = Run(cluster, "chain", steps=STEPS, profile={"starter": "srun"}, chain="3").submit()
    run.wait_for_step(BEFORE)
    cluster.run("scancel", "--signal=TERM", run.jobs[0])
    run.wait_for_end()
    return run.problems(loss=losses.get("tp1"), lives=2)


@case
def two_at_once(cluster: Cluster, losses: dict[str, float]) -> list[str]:
    """On the same two nodes."""
    runs = [Run(cluster, f"beside-{number}", steps=8, profile={}).submit() for number in range(2)]
    for run in runs:
        run.wait_for_end()
    return [problem for run in runs for problem in run.problems()]


@case
def wrong_setting(cluster: Cluster, losses: dict[str, float]) -> list[str]:
    """A wrong setting is not retried, and is told once."""
    run = Run(cluster, "wrong", steps=8, profile={})
    run.command.insert(5, "data.directory=/dev/null/nowhere")
    run.submit().wait_for_end()
    found = run.problems(state="failed")
    return found + ([f"{run.lives()} lives"] if run.lives() != 1 else [])


def _tested(cluster: Cluster, name: str, words: str, *, stops: bool = True, **profile: Any) -> list[str]:
    run = Run(cluster, f"test-{name}", steps=1, profile=profile)
    said = cluster.run(sys.executable, "-m", "nemo2", "cluster", "test", "here", cwd=run.place, check=False)
    named = re.search(words, said) and ("runs will fail" in said) == stops
    return [] if named else [f"{name}: {words!r} is not in: {said}"]


@case
def defects(cluster: Cluster, losses: dict[str, float]) -> list[str]:
    """`nemo2 cluster test` without a fault, and with one after the other."""
    found = _tested(cluster, "well", "2 nodes add up; runs can start", stops=False)
    found += _tested(cluster, "partition", "invalid partition.*sinfo", partition="nowhere")
    found += _tested(cluster, "python", "no/python isn't there", python="/no/python")
    found += _tested(cluster, "image", "no pyxis", container_image="a/b:c")
    bad = cluster.folder / "bad"
    bad.mkdir()
    python = bad / "python"
    python.write_text(f'#!/bin/sh\n[ "$(hostname)" = node2 ] && export PYTHONPATH={bad}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    other = bad / "torch-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
    found += _tested(cluster, "version", "torch is 1.0 on node2", python=str(python))
    hosts = cluster.folder / "s" / "etc" / "hosts"
    before = hosts.read_text()
    hosts.write_text(f"127.0.1.1 node1 node2\n{before}")
    try:
        found += _tested(cluster, "hosts", r"resolves to 127\.0\.1\.1", stops=False)
    finally:
        hosts.write_text(before)
    return found


@case
def without_accounting(cluster: Cluster, losses: dict[str, float]) -> list[str]:
    with Cluster(accounting=False) as other:
        found = _disturbed(
            other, losses, "unaccounted", lambda run: print(other.run("scontrol", "requeue", run.jobs[0]), end="")
        )
        return found + _tested(other, "accounting", "note: no accounting", stops=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=[*CASES], help="These cases alone.")
    parser.add_argument("--times", type=int, default=1, help="Each so often, disturbed at other moments.")
    given = parser.parse_args()
    losses: dict[str, float] = {}
    failed = 0
    began = time.monotonic()
    for _ in range(given.times):
        with Cluster() as cluster:
            for name in given.only or CASES:
                started = time.monotonic()
                try:
                    problems = CASES[name](cluster, losses)
                except Exception as error:
                    problems = [f"{type(error).__name__}: {error}"]
                failed += bool(problems)
                print(f"{name:20} {'ok' if not problems else 'FAILED'} {time.monotonic() - started:6.0f} s", flush=True)
                for problem in problems:
                    print(f"    {problem}", flush=True)
                for job in cluster.queue():
                    cluster.run("scancel", job, check=False)
    print(f"{time.monotonic() - began:.0f} s in all, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
