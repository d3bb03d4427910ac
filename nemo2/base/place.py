# SPDX-License-Identifier: Apache-2.0
"""The rank of this process among those that were started together, the cores that it may use, and whether it writes to
a terminal. No other module reads a launcher's variables.

| launcher | detected by | rank, world, rank on the node |
|---|---|---|
| torchrun | TORCHELASTIC_RUN_ID | RANK, WORLD_SIZE, LOCAL_RANK |
| variables: a Ray actor's, Kubeflow's, a job script's | RANK | the same |
| srun, a task per rank | SLURM_PROCID in a step | SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID |
| mpirun (Open MPI) | OMPI_COMM_WORLD_RANK | OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK |
| mpirun (MPICH, Intel MPI) | PMI_RANK | PMI_RANK, PMI_SIZE, MPI_LOCALRANKID |
| Lightning's own, for a node's other processes | LOCAL_RANK alone | LOCAL_RANK on one node, WORLD_SIZE, LOCAL_RANK |

The first row that applies counts. Imports nothing heavy, so it can be used before torch is imported.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, Optional

CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
"""The CPU time that a container gets: ``150000 100000`` for 1.5 cores, ``max 100000`` for all."""

LAUNCH_VARIABLE = "NEMO2_RUN_DIR_FILE"
"""A launch's own, the same for all its starts: the file that rank 0 writes the run directory's path to."""

Launcher = Literal["torchrun", "variables", "srun", "mpirun", "lightning", "none"]

_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)
_SRUN_PORTS = 15000
"""Lightning's choice for tasks of srun: this and the last four digits of the job's number."""

SET_ON_RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
"""Variables that every launcher sets on each rank."""
PORT = "MASTER_PORT"
OF_A_RANK = (
    *SET_ON_RANKS,
    PORT,
    "TORCHELASTIC_RUN_ID",
    "SLURM_PROCID",
    "SLURM_STEP_ID",
    *(name for names in _MPI for name in names),
)
"""Variables that make a process a rank. A separate process that a rank starts receives none of them."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A process among ``world_size``. Rank 0 of 1 where nothing has launched it."""

    launcher: Launcher = "none"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Among those on this node."""
    address: Optional[str] = None
    """The name or IP address of rank 0. None: unknown."""
    port: Optional[int] = None
    restarts: int = 0
    """How often the launcher has started these processes again."""
    job: Optional[str] = None
    """The scheduler's number of the job."""
    launch: Optional[str] = None
    """A value that distinguishes a launch from all others and is the same for each of its starts. None: no nemo2
    launcher started this process."""

    @property
    def launched(self) -> bool:
        """Whether all ranks were started from outside, each of them told its rank."""
        return self.launcher not in ("none", "lightning")


def here(variables: Optional[Mapping[str, str]] = None) -> Place:
    """This process' place, as ``variables`` say. None: its environment, read anew, since a launcher within this process may have
    changed it."""
    env = os.environ if variables is None else variables
    common = {"job": env.get("SLURM_JOB_ID"), "restarts": _number(env.get("TORCHELASTIC_RESTART_COUNT")) or 0}
    common["launch"] = env.get(LAUNCH_VARIABLE)
    port = _number(env.get("MASTER_PORT"))
    meeting = {"address": env.get("MASTER_ADDR"), "port": port}
    if _known(env, "RANK"):
        launcher: Launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in env else "variables"
        return _place(env, launcher, "RANK", "WORLD_SIZE", "LOCAL_RANK", **meeting, **common)
    # Both are set in tasks of srun only; in a batch script, which starts nothing by itself, SLURM_NTASKS is set as well.
    if _known(env, "SLURM_PROCID", "SLURM_STEP_ID", "SLURM_NTASKS"):
        meeting = {
            "address": env.get("MASTER_ADDR")
            or _first_host(env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")),
            "port": port or _port_of_job(env.get("SLURM_JOB_ID")),
        }
        return _place(env, "srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", **meeting, **common)
    for rank, size, local in _MPI:
        if _known(env, rank, size):
            return _place(env, "mpirun", rank, size, local, **meeting, **common)
    if _known(env, "LOCAL_RANK"):
        return _place(env, "lightning", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_RANK", **meeting, **common)
    return Place(**common)


def _place(env: Mapping[str, str], launcher: Launcher, rank: str, size: str, local: str, **others: object) -> Place:
    return Place(
        launcher=launcher,
        rank=_number(env.get(rank)) or 0,
        world_size=_number(env.get(size)) or 1,
        local_rank=_number(env.get(local)) or 0,
        **others,  # pyright: ignore[reportArgumentType]  (the fields that `here` names)
    )


def _known(env: Mapping[str, str], *names: str) -> bool:
    return all(_number(env.get(name)) is not None for name in names)


def _number(text: Optional[str]) -> Optional[int]:
    return int(text) if text is not None and text.isdecimal() else None


def _first_host(nodes: Optional[str]) -> Optional[str]:
    """The first host of Slurm's list: ``gpu[03-05,9],login`` gives ``gpu03``."""
    if not nodes:
        return None
    first = re.match(r"(?P<name>[^,\[]+)(\[(?P<number>\d+)[^\]]*\](?P<rest>[^,]*))?", nodes)
    return None if first is None else f"{first['name']}{first['number'] or ''}{first['rest'] or ''}"


def _port_of_job(job: Optional[str]) -> int:
    return _SRUN_PORTS + int(job[-4:]) if job and job.isdecimal() else 12910


def is_terminal(stream: IO[str]) -> bool:
    """Whether a moving bar can be drawn on ``stream``."""
    return bool(getattr(stream, "isatty", lambda: False)()) and os.environ.get("TERM", "dumb") != "dumb"


def usable_cores() -> float:
    """The number of cores that this process may use, by its affinity and the limit of its container (cgroup v2)."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    try:
        quota, period = CPU_LIMIT.read_text().split()
        return cores if quota == "max" else min(cores, int(quota) / int(period))
    except (OSError, ValueError):
        return cores
