# SPDX-License-Identifier: Apache-2.0
"""The batch script of a run, which a person can read, pass to sbatch, and find again in the job's folder.

nemo-run 0.11 writes its own script. nemo2 has another because of these properties of nemo-run's: it writes variables
unquoted into a file of mode 0644; the rendezvous is always at port 29500 of the address that ``hostname --ip-address``
prints; it has no requeueing; it sets a time limit of ten minutes.

A life is one start of the script. Slurm starts it again after a requeue, and a chain of jobs starts it once each. All
lives continue one run in one run directory, until `aftermath` finds that the run is done or has failed for good.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Optional

from nemo2.errors import ConfigError

Starter = Literal["torchrun", "srun"]

SECRETS = "secrets.sh"
"""A file in the job's folder, of mode 0600, with the variables whose names look like secrets."""
SCRIPT = "job.sh"
LIVES = "lives"
STATE = "state.json"

_ENTRY = "nemo2.launch.rank"
_AFTERMATH = "nemo2.launch.slurm.aftermath"
_MOST_GRACE = 3600


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
    grace_seconds: int = 120
    """The time before the time limit at which a run is asked to save. 0: never."""
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


def job_script(job: Job) -> str:
    """The text of the script.

    Raises:
        ConfigError: a value that an ``#SBATCH`` line can't contain.
    """
    return "\n".join([*_head(job), *_body(job)]) + "\n"


def _head(job: Job) -> list[str]:
    options: dict[str, Optional[str]] = {
        "job-name": job.name,
        "nodes": str(job.nodes),
        "ntasks-per-node": str(job.devices if job.starter == "srun" else 1),
        **({"time": job.time} if job.time else {}),
        "output": f"{job.folder}/job-%j.out".replace("%", "%%").replace("%%j", "%j"),
        "open-mode": "append",
        **({"requeue": None} if job.requeue else {"no-requeue": None}),
        **({"signal": f"TERM@{min(job.grace_seconds, _MOST_GRACE)}"} if job.grace_seconds else {}),
        **job.directives,
    }
    return ["#!/bin/bash", *(_directive(name, value) for name, value in options.items())]


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


def _body(job: Job) -> list[str]:
    folder = shlex.quote(job.folder)
    return [
        "",
        f"folder={folder}",
        f"python={shlex.quote(job.python)}",
        "# The run has ended: nothing is left to do for a further link of a chain, or for a requeue.",
        f'grep -Eq \'"state": "(done|failed|cancelled)"\' "$folder/{STATE}" 2>/dev/null && exit 0',
        "",
        *(["# Set-up of the user's.", job.setup_lines.strip(), ""] if job.setup_lines.strip() else []),
        *(f"export {name}={shlex.quote(value)}" for name, value in sorted(job.variables.items())),
        f'[ -f "$folder/{SECRETS}" ] && . "$folder/{SECRETS}"',
        "export PYTHONUNBUFFERED=1",
        "unset PYTHONDONTWRITEBYTECODE",
        "",
        "# Each start of this script has a folder of its own: first errors of ranks, their output.",
        f'mkdir -p "$folder/{LIVES}"',
        "life=0",
        f'until mkdir "$folder/{LIVES}/$life" 2>/dev/null; do life=$((life + 1)); [ $life -lt 100000 ] || exit 1; done',
        f'export NEMO2_LIFE="$folder/{LIVES}/$life"',
        'export NEMO2_FAULT_DIR="$NEMO2_LIFE/faults"',
        'echo "$SLURM_JOB_ID" >"$NEMO2_LIFE/job"',
        'written=$(stat --format=%s "$folder/job-$SLURM_JOB_ID.out" 2>/dev/null || echo 0)',
        "# Lines of Slurm's in this life.",
        'said() { tail -c +$((written + 1)) "$folder/job-$SLURM_JOB_ID.out" 2>/dev/null | grep -a "$1"; }',
        *(['mkdir -p "$NEMO2_LIFE/nsys_profile"'] if job.nsys else []),
        "",
        *_RENDEZVOUS,
        "",
        "# srun is waited for in the background: what signals this script is not to end it before the ranks have saved.",
        "trap : TERM USR1 USR2 HUP INT",
        *_step(job),
        "running=$!",
        *_WATCH,
        'wait "$running"',
        "code=$?",
        'while kill -0 "$running" 2>/dev/null; do wait "$running"; code=$?; done',
        'kill "$watching" 2>/dev/null',
        "",
        "# Another life began while this node was cut off: the run, and the job's place in the queue, are its own.",
        f'[ -d "$folder/{LIVES}/$((life + 1))" ] && exit 143',
        "",
        *_end(job),
    ]


_RENDEZVOUS = [
    "# Where rank 0 is met: an address of this node that is not the loopback's, and a port that nothing listens on.",
    "head=${SLURMD_NODENAME:-$(hostname -s)}",
    "MASTER_ADDR=$(scontrol show node \"$head\" --oneliner 2>/dev/null | sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p')",
    "case $MASTER_ADDR in",
    "    '' | *[!0-9.]*) MASTER_ADDR=$(getent ahostsv4 \"${MASTER_ADDR:-$head}\" | awk '$1 !~ /^127\\./ {print $1; exit}') ;;",
    "esac",
    "[ -n \"$MASTER_ADDR\" ] || MASTER_ADDR=$(hostname -I | tr ' ' '\\n' | grep -v '^127\\.' | head -n 1)",
    "MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))",
    "# The kernel's list of sockets: 0A is one that listens, at whichever of this node's addresses.",
    'taken() { grep -qE ":$(printf %04X "$MASTER_PORT") [0-9A-F]+:[0-9A-F]{4} 0A " /proc/net/tcp /proc/net/tcp6 2>/dev/null; }',
    "while taken; do",
    '    echo "port $MASTER_PORT of $head is in use"; MASTER_PORT=$((MASTER_PORT + 1))',
    "done",
    "export MASTER_ADDR MASTER_PORT",
]


_WATCH = [
    "# Where a node couldn't start its task, as one that doesn't see this folder, srun waits for the others for ever.",
    "(",
    "    for _ in $(seq 60); do",
    "        sleep 5",
    '        failed=$(said "task.* launch failed") && { echo "$failed" >"$NEMO2_LIFE/task-srun.out"; kill "$running"; break; }',
    "    done",
    ") >/dev/null 2>&1 &",
    "watching=$!",
]


def _step(job: Job) -> list[str]:
    """The step with the ranks, in the background. Bash expands none of the user's values."""
    tasks = f"--ntasks-per-node={job.devices if job.starter == 'srun' else 1}"
    words = ["srun", f"--nodes={job.nodes}", tasks, "--kill-on-bad-exit=1", "--cpu-bind=none"]
    lines = [" ".join([*words, '--output="$NEMO2_LIFE/task-%t.out"', '--error="$NEMO2_LIFE/task-%t.out"']) + " \\"]
    for option in [*_container(job), *job.srun_args]:
        lines.append(f"    {option if option.startswith('--container-mounts=') else shlex.quote(option)} \\")
    under = _nsys(job)
    if job.starter == "torchrun":
        launcher, options = "torch.distributed.run", ""
        if job.monitor is not None:
            launcher = "nvidia_resiliency_ext.fault_tolerance.launcher"
            options = "".join(f"--ft-{name} {shlex.quote(value)} " for name, value in job.monitor.items())
        command = (
            f'exec {under}"$1" -m {launcher} {options}--nnodes "$2" --nproc-per-node "$3" --node-rank "$SLURM_NODEID" '
            '--master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" --max-restarts "${PET_MAX_RESTARTS:-0}" $4 "$5"'
        )
        # Slurm itself asks the ranks to stop, and torchrun leaves them this long to save.
        lines.insert(0, f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={max(30, job.grace_seconds)}")
        # A rank that restarts would find the dead rank's address in the shared store.
        lines.insert(1, "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")
    else:
        command = (
            'export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE="$3" '
            f'NODE_RANK=$SLURM_NODEID; exec {under}"$1" $4 "$5"'
        )
    workdir = shlex.quote(job.workdir or job.folder)
    command = f"cd {workdir} && {command}"
    last = f'ranks "$python" {job.nodes} {job.devices} {shlex.quote(job.program)} "$folder" &'
    return [*lines, f"    bash -c {shlex.quote(command)} {last}"]


def _nsys(job: Job) -> str:
    """The prefix of the command of a node or of a task. "": without nsys. Its recordings are in the life's folder."""
    if not job.nsys:
        return ""
    # One file per traced process: nsys replaces %p by the process id.
    output = '-o "$NEMO2_LIFE/nsys_profile/node$SLURM_NODEID-%p" '
    return f"nsys {' '.join(map(shlex.quote, job.nsys))} {output}"


def _container(job: Job) -> list[str]:
    if not job.container_image:
        return []
    mounts = ",".join(dict.fromkeys([f"{job.folder}:{job.folder}", *job.container_mounts]))
    return [
        f"--container-image={job.container_image}",
        f"--container-mounts={shlex.quote(mounts)}",
        "--no-container-mount-home",
    ]


def _end(job: Job) -> list[str]:
    alone = "srun --nodes=1 --ntasks=1 --overlap " + " ".join(
        option if option.startswith("--container-mounts=") else shlex.quote(option) for option in _container(job)
    )
    judge = f'{alone + " " if job.container_image else ""}"$python" -m {_AFTERMATH}'
    retries = "" if job.retries is None else f" --retries {job.retries}"
    lines = [
        "# Done, to be continued, or failed: the ranks' own words decide, and what Slurm has decided meanwhile.",
        "state=$(scontrol show job \"$SLURM_JOB_ID\" --oneliner 2>/dev/null | sed -n 's/.* JobState=\\([A-Z_]*\\).*/\\1/p')",
        "# While a job is completing, its state doesn't say why; slurmd's own line does, unless a user cancelled it.",
        'why=$(said "JOB $SLURM_JOB_ID ON .* CANCELLED AT" | tail -n 1)',
        'case "$why" in',
        "    *NODE*FAIL*) state=NODE_FAIL ;;",
        "    *PREEMPT*) state=PREEMPTED ;;",
        "    *REQUEUE*) state=REQUEUED ;;",
        '    "" | *"DUE TO"*) ;;',
        "    *) state=CANCELLED ;;",
        "esac",
        f'verdict=$({judge} "$folder" --life "$life" --code "$code" --state "${{state:-RUNNING}}"{retries} | tail -n 1)',
        'echo "life $life: $verdict"',
        'case "$verdict" in',
    ]
    if job.requeue:
        lines += [
            "    again)",
            "        trap - TERM",
            '        case "$state" in RUNNING | "") scontrol requeue "$SLURM_JOB_ID" && sleep 300 ;; esac',
            "        exit 143 ;;",
        ]
    else:
        lines += ["    again) exit 143 ;;"]
    return [
        *lines,
        '    done) [ -f "$folder/chain" ] && scancel $(grep -vx "$SLURM_JOB_ID" "$folder/chain") 2>/dev/null; exit 0 ;;',
        '    *) [ -f "$folder/chain" ] && scancel $(grep -vx "$SLURM_JOB_ID" "$folder/chain") 2>/dev/null; exit 1 ;;',
        "esac",
    ]
