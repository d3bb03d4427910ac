# SPDX-License-Identifier: Apache-2.0
"""Slurm's queue: submits jobs and reports their states, with accounting or without.

``squeue`` and ``scontrol`` know a job for some minutes after its end (MinJobAge). ``sacct`` always knows it, if the
cluster has accounting. nemo-run 0.11 asks only sacct, and gives up on jobs if it can't answer.
"""

import re
import shlex
from collections.abc import Sequence
from typing import Optional

from nemo2.base.errors import ConfigError
from nemo2.launch.slurm.shell import Shell, output

WAITING = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
)
RUNNING = frozenset({"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"})
_HELP = {
    "invalid partition": "check partition; `sinfo -s` lists them",
    "invalid account": "check account and partition; `sacctmgr show assoc user=$USER` lists yours",
    "time limit": "lower time, or choose another partition; `sinfo -o '%P %l'` shows the limits",
    "node count": "lower nodes, or choose another partition; `sinfo -o '%P %D'` shows the sizes",
    "invalid qos": "check qos",
    "container-image": "the cluster has no pyxis, which --container-image requires; leave container_image unset",
    "command not found": "this machine has no Slurm; log in on a machine that has it, or set ssh in the profile",
    "configuration source": (
        "this machine knows no cluster; log in on a machine where sinfo answers, or set ssh in the profile"
    ),
    "contact slurm controller": "the controller is down; `scontrol ping` shows when it is back",
    "gres": "the partition has no such GPUs; check gpus_per_node (`sinfo -o '%P %G'` shows the GPUs)",
}


def submit(shell: Shell, script: str, *, after: Optional[str] = None) -> str:
    """Submit a script with ``sbatch`` and return the job's number.

    Args:
        after: The job whose end, however it ends, this job waits for.

    Raises:
        ConfigError: Slurm rejects the job. The message has Slurm's words and a hint.
    """
    dependency = f"--dependency=afterany:{after} " if after else ""
    code, out, err = shell.run(f"sbatch --parsable {dependency}{shlex.quote(script)}")
    number = re.match(r"\d+", out.strip())
    if code != 0 or number is None:
        words = " ".join((err or out).split()) or f"exit code {code}"
        advice = next((help for sign, help in _HELP.items() if sign in words.lower()), "see the script")
        raise ConfigError(f"sbatch refuses the job: {words} ({advice}). The script: {script}")
    return number[0]


def state(shell: Shell, job: str) -> str:
    """Slurm's word for a job, or "UNKNOWN" if Slurm no longer knows it.

    Raises:
        RuntimeFault: Slurm's controller doesn't answer.
    """
    code, out, err = shell.run(f"squeue --noheader --states=all --format=%T --jobs={shlex.quote(job)}")
    if code == 0 and out.strip():
        return out.split()[0]
    if code != 0 and "invalid job id" not in err.lower():
        output(shell, "scontrol ping")  # a controller that is down is no answer
    code, out, _ = shell.run(f"sacct --noheader --parsable2 --allocations --format=State --jobs={shlex.quote(job)}")
    return out.split()[0] if code == 0 and out.strip() else "UNKNOWN"


def with_hold(shell: Shell, job: str, word: str) -> str:
    """The word for a job. If the job waits for a release, the word includes the reason and the fix.

    Slurm holds a job that a node couldn't start, such as a node that was cut off and returned with processes of the
    job's previous life.
    """
    if word not in WAITING:
        return word
    _, why, _ = shell.run(f"squeue --noheader --states=all --format=%r --jobs={shlex.quote(job)}")
    why = why.strip()
    return f"{word}, held ({why}): `scontrol release {job}` releases it" if "held" in why.lower() else word


def is_active(word: str) -> bool:
    """Whether a job in this state is waiting or running."""
    return word in WAITING or word in RUNNING


def cancel(shell: Shell, jobs: Sequence[str]) -> None:
    """End jobs, including waiting ones. Their ranks are asked to save first."""
    if jobs:
        output(shell, "scancel " + " ".join(map(shlex.quote, jobs)))
