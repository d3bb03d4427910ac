# SPDX-License-Identifier: Apache-2.0
"""The batch script of a run, which a person can read, pass to sbatch, and find again in the job's folder.

nemo-run 0.11 writes its own script. nemo2 has another because of these properties of nemo-run's: it writes variables
unquoted into a file of mode 0644; the rendezvous is always at port 29500 of the address that ``hostname --ip-address``
prints; it has no requeueing; it sets a time limit of ten minutes.

A life is one start of the script. Slurm starts it again after a requeue, and a chain of jobs starts it once each. All
lives continue one run in one run directory, until `job_result` finds that the run is done or has failed for good.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Optional

from nemo2.base.errors import ConfigError

Starter = Literal["torchrun", "srun"]

SECRETS = "secrets.sh"
"""A file in the job's folder, of mode 0600, with the variables whose names look like secrets."""
SCRIPT = "job.sh"
LIVES = "lives"
STATE = "state.json"

_TORCHRUN_SIGNALS = ("TERM", "INT", "HUP", "QUIT")
_ENTRY = "nemo2.launch.rank"
MOST_UNJUDGED = 3
"""The starts without a verdict after which a job doesn't start again."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """The contents of a run's script."""

    name: str
    folder: str
    """The job's folder, on a file system that all nodes see."""
    nodes: int
    devices: int
    """Ranks per node."""
    starter: Starter = "torchrun"
    time: str = ""
    """Slurm's time limit. "": the partition's."""
    directives: Mapping[str, Optional[str]] = field(default_factory=dict)
    """Further options of sbatch by name, without dashes. None for options without a value."""
    variables: Mapping[str, str] = field(default_factory=dict)
    setup_lines: str = ""
    """The user's Bash lines, which run before everything else in the job."""
    python: str = "python3"
    workdir: str = ""
    """The working directory of the ranks. "": the folder."""
    srun_args: tuple[str, ...] = ()
    container_image: str = ""
    container_mounts: tuple[str, ...] = ()
    container_env: tuple[str, ...] = ()
    """The variables whose values win over the image's."""
    grace_seconds: int = 120
    """The time before the time limit at which a run is asked to save. 0: never."""
    early_signal: str = "TERM"
    """The signal, without SIG, that Slurm sends before the time limit."""
    requeue: bool = True
    """Whether Slurm requeues the job. False in a chain, whose next link continues the run."""
    retries: Optional[int] = None
    """How often the job is started again after a failure. None: as long as it makes progress."""
    nsys: tuple[str, ...] = ()
    """The arguments of ``nsys``, except those of its output, under which the ranks run. Empty: without nsys."""
    monitor: Optional[Mapping[str, str]] = None
    """Options by name of nvidia-resiliency-ext's launcher, which replaces torchrun. None: torchrun."""
    program: str = f"-m {_ENTRY}"
    """The program that Python runs on every rank with the folder as its argument: ``-m MODULE``, or a file in the
    folder."""

    @property
    def signals_to_handle(self) -> str:
        """The signals that torchrun has to pass on to its ranks. "": its own list has the early signal. At any other
        signal it ends at once, and its ranks with it."""
        own = self.starter == "srun" or self.early_signal in _TORCHRUN_SIGNALS
        return "" if own else ",".join(f"SIG{name}" for name in (*_TORCHRUN_SIGNALS, self.early_signal))

    @property
    def tasks_per_node(self) -> int:
        """Srun starts every rank itself, or a torchrun on every node."""
        return self.devices if self.starter == "srun" else 1


def job_script(job: Job) -> str:
    """The text of the script: ``job.sh.j2``, whose step runs ``task.sh.j2`` once per task of srun.

    Raises:
        ConfigError: a value that an ``#SBATCH`` line can't contain.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    templates.filters["quote"] = shlex.quote
    templates.globals |= {
        "job": job,
        "JUDGE": "nemo2.launch.slurm.job_result",
        "LIVES": LIVES,
        "STATE": STATE,
        "SECRETS": SECRETS,
        "MOST_UNJUDGED": MOST_UNJUDGED,
        "retries": "" if job.retries is None else f" --retries {job.retries}",
        "monitor": "".join(f"--ft-{name} {shlex.quote(value)} " for name, value in (job.monitor or {}).items()),
        "container": _container(job),
    }
    # Bash expands none of the user's values: the options of srun are quoted, and so is the whole of a task.
    task = templates.get_template("task.sh.j2").render()
    options = [*_container(job), *map(shlex.quote, job.srun_args)]
    script = templates.get_template("job.sh.j2").render(directives=_directives(job), srun_options=options, task=task)
    return f"{script}\n"


def _directives(job: Job) -> list[str]:
    options: dict[str, Optional[str]] = {
        "job-name": job.name,
        "nodes": str(job.nodes),
        "ntasks-per-node": str(job.tasks_per_node),
        **({"time": job.time} if job.time else {}),
        "output": f"{job.folder.replace('%', '%%')}/job-%j.out",
        "open-mode": "append",
        **({"requeue": None} if job.requeue else {"no-requeue": None}),
        **({"signal": f"TERM@{job.grace_seconds}"} if job.grace_seconds else {}),
        **job.directives,
    }
    return [_directive(name, value) for name, value in options.items()]


def _directive(name: str, value: Optional[str]) -> str:
    if value is None:
        return f"#SBATCH --{name}"
    if any(character in value for character in '\n\r"\\'):
        raise ConfigError(
            f"--{name}={value!r}: a line of #SBATCH cannot contain line breaks, double quotes or backslashes. Remove "
            "them."
        )
    plain = all(character.isalnum() or character in "_-./:@,=%+[]" for character in value)
    return f"#SBATCH --{name}={value}" if plain else f'#SBATCH --{name}="{value}"'


def _container(job: Job) -> list[str]:
    """The options of srun, quoted, that run a step in the job's container."""
    if not job.container_image:
        return []
    mounts = ",".join(dict.fromkeys([f"{job.folder}:{job.folder}", *job.container_mounts]))
    return [
        shlex.quote(f"--container-image={job.container_image}"),
        f"--container-mounts={shlex.quote(mounts)}",
        "--no-container-mount-home",
        *([f"--container-env={','.join(job.container_env)}"] if job.container_env else []),
    ]
