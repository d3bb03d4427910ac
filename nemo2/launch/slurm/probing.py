# SPDX-License-Identifier: Apache-2.0
"""``nemo2 cluster test``: a job of seconds on two nodes that finds faults of the cluster or the profile, each with a
fix.

The job's script is that of a run, with `probe` in place of training, so a test that passes means that runs start.
"""

import json
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

import nemo_run

from nemo2.base.errors import ConfigError, Nemo2Error
from nemo2.launch.slurm import probe, queue
from nemo2.launch.slurm.script import SCRIPT, Job, job_script
from nemo2.launch.slurm.settings import ClusterSettings
from nemo2.launch.slurm.shell import Shell, shell_of
from nemo2.launch.slurm.start import job_of

LEAST_FREE_GB = 1.0
MOST_SECONDS_APART = 5.0
_PROBE_TIME = "5"


class Finding(NamedTuple):
    """``stops`` tells whether runs fail with it, rather than lose some convenience."""

    message: str
    stops: bool = True


def test_cluster(
    executor: Any, settings: ClusterSettings, *, nodes: int = 2, wait_seconds: float = 600.0
) -> Iterator[Finding]:
    """The faults that were found. Empty: there are none. Takes the time in the queue, and some seconds.

    Args:
        wait_seconds: The longest time that the job may wait in the queue.

    Raises:
        ConfigError: the executor isn't Slurm's.
    """
    if not isinstance(executor, nemo_run.SlurmExecutor):
        raise ConfigError(
            f"`nemo2 cluster test` supports only SlurmExecutor, not {type(executor).__name__}. Use the tools of its platform, or "
            "print its request with `nemo2 pretrain NAME --executor ... --dryrun`."
        )
    shell = shell_of(executor.tunnel)
    try:
        yield from _before(shell)
        job = job_of(
            executor, settings, name="nemo2-test", experiment_id=f"test_{time.time_ns()}", devices=1, nodes=nodes
        )
        job = replace(job, time=_PROBE_TIME, requeue=False, grace_seconds=0, program="probe.py")
        token = secrets.token_hex(8)
        number = _submit(shell, job, token)
        try:
            word = _wait(shell, number, wait_seconds)
        finally:
            queue.cancel(shell, [number]) if queue.is_active(queue.state(shell, number)) else None
    except Nemo2Error as error:
        yield Finding(str(error))
        return
    if word in queue.WAITING:
        _, why, _ = shell.run(f"squeue --noheader --format=%r --jobs={number}")
        yield Finding(
            f"the job waited {wait_seconds:.0f} s in the queue ({why.strip() or word}). To wait longer, pass `--wait`."
        )
        return
    _, text, _ = shell.run(f"cat {quote(job.folder)}/lives/*/task-*.out {quote(job.folder)}/job-*.out 2>/dev/null")
    wanted = gpus_of(executor, settings)
    findings = list(judge(text, nodes=nodes, token=token, python=job.python, folder=job.folder, word=word, gpus=wanted))
    yield from findings
    if not any(finding.stops for finding in findings):
        shell.run(f"rm -rf {quote(job.folder)}")


def gpus_of(executor: Any, settings: ClusterSettings) -> int:
    """The number of GPUs that a profile promises on each node. 0: it names none."""
    if executor.gpus_per_node:
        return int(executor.gpus_per_node)
    return int(bool(settings.gpu or executor.gpus_per_task or "gpu" in (executor.gres or "")))


def _before(shell: Shell) -> Iterator[Finding]:
    code, _, err = shell.run("command -v sbatch squeue scontrol >/dev/null && scontrol ping")
    if code != 0:
        words = " ".join(err.split())
        raise ConfigError(
            f"Slurm's commands don't work on this machine ({words or 'not on the PATH'}). Log in on a machine where sbatch "
            "works."
        )
    code, _, err = shell.run("sacct --noheader --jobs=1")
    if code != 0:
        words = " ".join(err.split())
        yield Finding(
            f"no accounting ({words}): nemo2 reads job states from squeue and scontrol, which forget them some "
            "minutes after a job ends (MinJobAge). Runs are not affected.",
            stops=False,
        )


def _submit(shell: Shell, job: Job, token: str) -> str:
    with tempfile.TemporaryDirectory() as temporary:
        staged = Path(temporary) / "job"
        staged.mkdir(mode=0o700)
        (staged / "token").write_text(token, encoding="utf-8")
        (staged / SCRIPT).write_text(job_script(job), encoding="utf-8")
        shutil.copy2(probe.__file__, staged / "probe.py")
        shell.place(staged, job.folder)
    return queue.submit(shell, f"{job.folder}/{SCRIPT}")


def _wait(shell: Shell, number: str, wait_seconds: float) -> str:
    """Slurm's last word for the job, or the reason why it waits."""
    queued, running = time.monotonic() + wait_seconds, None
    while True:
        word = queue.state(shell, number)
        if word in queue.RUNNING and running is None:
            running = time.monotonic() + 400.0
        if not queue.is_active(word):
            return word
        if time.monotonic() > (running or queued):
            return word
        time.sleep(1.0 if shell.local else 5.0)


def judge(
    text: str, *, nodes: int, token: str, python: str, folder: str, word: str = "COMPLETED", gpus: int = 0
) -> Iterator[Finding]:
    """The faults in the output of a test's tasks.

    Args:
        gpus: The number of GPUs that each node must have.
    """
    reports: dict[int, dict[str, Any]] = {}
    for line in text.splitlines():
        _, mark, record = line.partition("probe {")
        if mark:
            data = json.loads("{" + record)
            reports.setdefault(data["rank"], {}).update(data)
    if len(reports) < nodes:
        yield _silent(text, reports, nodes=nodes, python=python, folder=folder, word=word)
        if not reports:
            return
    hosts = {rank: data["host"] for rank, data in reports.items()}
    for rank, data in sorted(reports.items()):
        host = hosts[rank]
        if data["token"] != token:
            seen = "another folder under this name" if data["sees_folder"] else "nothing there"
            yield Finding(
                f"{host} sees {seen}, so {folder} is not shared. Set job_dir and runs to a file system that all nodes "
                "mount."
            )
        if data["free_gb"] is not None and data["free_gb"] < LEAST_FREE_GB:
            yield Finding(
                f"{host}: {data['free_gb']} GB are free at {folder}. Make room, or set job_dir and runs elsewhere."
            )
        if loopback := [address for address in data["addresses"] if address.startswith("127.")]:
            yield Finding(
                f"{host}: its own name resolves to {', '.join(loopback)} (a line of /etc/hosts). nemo2 uses Slurm's "
                "address and picks gloo's interface, but other programs do not. Ask for the line to be removed.",
                stops=False,
            )
        if data["versions"]["nemo2"] is None:
            yield Finding(
                f"{host}: {python} has no nemo2. Install it there, or name another python, set-up lines or container_image."
            )
        if (seen := data.get("gpus")) is not None and seen < gpus:
            why = data.get("no_gpu") or "`nvidia-smi` there tells what Slurm gives a job"
            build = f"of CUDA {data['cuda']}" if data["cuda"] else "without CUDA"
            yield Finding(
                f"{host}: torch {build} sees {seen} of {gpus} GPUs ({why}). Install a torch for a CUDA version that "
                "the node's driver supports, ask for a newer driver, or correct gpus_per_node, gres or gpu."
            )
    for port, host in dict(re.findall(r"^port (\d+) of (\S+) is in use$", text, re.MULTILINE)).items():
        yield Finding(
            f"port {port} of {host} is in use by another program, so the run takes the next free port. Make sure that "
            "no firewall blocks it.",
            stops=False,
        )
    yield from _differences(reports, hosts)
    if sums := [data.get("error") or data.get("sum") for data in reports.values() if data.get("sum") != len(reports)]:
        yield Finding(
            f"the ranks can't add up one number over {len(reports)} nodes: {sums[0]}. Check for a firewall between the "
            "nodes and for a wrong network interface (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME in env)."
        )


def _differences(reports: dict[int, dict[str, Any]], hosts: dict[int, str]) -> Iterator[Finding]:
    first, *others = sorted(reports)
    for rank in others:
        for package, version in [*reports[rank]["versions"].items(), ("python", reports[rank]["python"])]:
            at_first = reports[first]["python"] if package == "python" else reports[first]["versions"][package]
            missing = package == "nemo2" and None in (version, at_first)  # already reported
            if version != at_first and not missing:
                yield Finding(
                    f"{package} is {version} on {hosts[rank]} and {at_first} on {hosts[first]}. Use one environment "
                    "on a shared file system, or one image."
                )
        apart = reports[rank]["time"] - reports[first]["time"]
        if abs(apart) > MOST_SECONDS_APART + _START_SECONDS:
            yield Finding(
                f"the clock of {hosts[rank]} is {apart:+.0f} s off the clock of {hosts[first]}. Slurm's "
                "credentials may expire, and files may look newer or older than they are. Ask for NTP."
            )


_START_SECONDS = 20.0
"""The time between the starts of a step's tasks on a loaded machine."""


def _silent(
    text: str, reports: dict[int, dict[str, Any]], *, nodes: int, python: str, folder: str, word: str
) -> Finding:
    lowered = text.lower()
    last = " / ".join(line.strip() for line in text.splitlines() if line.strip() and "probe {" not in line)[-400:]
    if "no such file or directory" in lowered and python in text:
        why = f"{python} does not exist there. Set python, set-up lines or container_image"
    elif "unrecognized option '--container" in lowered or "unrecognized option: --container" in lowered:
        why = "this Slurm has no pyxis, which containers require. Leave container_image unset, or ask for pyxis"
    elif "pyxis" in lowered or "enroot" in lowered:
        why = "the container image cannot be downloaded. Check container_image and the credentials of its registry"
    elif "no space left" in lowered:
        why = f"the disk of {folder} is full"
    elif "no such file or directory" in lowered or "can't open" in lowered or "could not connect io" in lowered:
        why = f"{folder} is not visible there. Set job_dir and runs to a file system that all nodes mount"
    elif not text.strip():
        why = f"nothing was written to {folder}. It is not shared, or its disk is full"
    else:
        why = "see its last output"
    said = f". Last output: {last}" if last else ""
    return Finding(f"{nodes - len(reports)} of {nodes} nodes reported nothing (job {word}): {why}{said}.")
