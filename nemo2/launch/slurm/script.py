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
from typing import Literal, Optional

from nemo2.errors import ConfigError

Starter = Literal["torchrun", "srun"]

SECRETS = "secrets.sh"
"""A file in the job's folder, of mode 0600, with the variables whose names look like secrets."""
SCRIPT = "job.sh"
LIVES = "lives"
STATE = "state.json"

_ENTRY = "nemo2.launch.rank"
_JUDGE = "nemo2.launch.slurm.job_result"
_MOST_GRACE = 3600
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
    return [
        "",
        f"_folder={shlex.quote(job.folder)}",
        f"_python={shlex.quote(job.python)}",
        "# The run has ended: nothing is left to do for a further link of a chain, or for a requeue.",
        f'grep -Eq \'"state": "(done|failed|cancelled)"\' "$_folder/{STATE}" 2>/dev/null && exit 0',
        "",
        "# Each start of this script has a folder of its own: first errors of ranks, their output.",
        f'mkdir -p "$_folder/{LIVES}"',
        "_life=0",
        f'until mkdir "$_folder/{LIVES}/$_life" 2>/dev/null; do _life=$((_life + 1)); [ $_life -lt 100000 ] || exit 1; done',
        f'export NEMO2_LIFE="$_folder/{LIVES}/$_life"',
        'export NEMO2_FAULT_DIR="$NEMO2_LIFE/faults"',
        'echo "$SLURM_JOB_ID" >"$NEMO2_LIFE/job"',
        '_written=$(stat --format=%s "$_folder/job-$SLURM_JOB_ID.out" 2>/dev/null || echo 0)',
        "# Lines of Slurm's in this life.",
        'said() { tail -c +$((_written + 1)) "$_folder/job-$SLURM_JOB_ID.out" 2>/dev/null | grep -a "$1"; }',
        "",
        *_end(job),
        "",
        "# What signals this script is not to end it before the ranks have saved.",
        _TRAP,
        *(_setup(job.setup_lines.strip()) if job.setup_lines.strip() else []),
        *(f"export {name}={shlex.quote(value)}" for name, value in sorted(job.variables.items())),
        f'[ -f "$_folder/{SECRETS}" ] && . "$_folder/{SECRETS}"',
        "export PYTHONUNBUFFERED=1",
        "unset PYTHONDONTWRITEBYTECODE",
        *(['mkdir -p "$NEMO2_LIFE/nsys_profile"'] if job.nsys else []),
        "",
        *_RENDEZVOUS,
        "",
        "# srun is waited for in the background, because Bash runs a trap only after a command in the foreground.",
        "export NEMO2_SCRIPT=$$ NEMO2_SCRIPT_NODE=$SLURMD_NODENAME NEMO2_WRITTEN=$_written",
        *_step(job),
        "_running=$!",
        *_WATCH,
        'wait "$_running"',
        "_code=$?",
        'while kill -0 "$_running" 2>/dev/null; do wait "$_running"; _code=$?; done',
        'kill "$_watching" 2>/dev/null',
        "",
        "# Another life began while this node was cut off: the run, and the job's place in the queue, are its own.",
        f'[ -d "$_folder/{LIVES}/$((_life + 1))" ] && exit 143',
        'finish --code "$_code"',
    ]


_TRAP = "trap : TERM USR1 USR2 HUP INT"


def _setup(lines: str) -> list[str]:
    """The user's lines, and the end of what they have set of the shell itself.

    Their variables, limits, file mask and a trap on EXIT stay. Options such as ``set -e`` would end the script where a
    command's exit code is no failure, as that of ``wait`` after a rank has failed.
    """
    return [
        '_shell="$(set +o; shopt -p)"',
        '_setup_ended() { \\eval "$_shell"; \\unalias -a; trap - EXIT; finish --cause setup --code "$1"; }',
        "trap '_setup_ended $?' EXIT",
        "# Set-up of the user's.",
        lines,
        "# What the lines have set of the shell itself ends here.",
        '\\eval "$_shell"',
        "\\unalias -a",
        f"\\unset -f {' '.join(_COMMANDS)}",
        "IFS=$' \\t\\n'",
        "trap - ERR DEBUG RETURN CHLD",
        _TRAP,
        'case "$(trap -p EXIT)" in *_setup_ended*) trap - EXIT ;; esac',
        "",
    ]


_COMMANDS = (
    "awk", "cat", "echo", "exit", "export", "getent", "grep", "head", "hostname", "kill", "ls", "mkdir", "printf",
    "sed", "seq", "sleep", "stat", "tail", "tr", "trap", "unset", "wait",
)  # fmt: skip
"""The commands of this script that no function of the user's lines may replace. A site's functions for Slurm's own
commands stay."""


_RENDEZVOUS = [
    "# Where rank 0 is met: an address of this node that is not the loopback's, and a port that nothing listens on.",
    "_head=${SLURMD_NODENAME:-$(hostname -s)}",
    "MASTER_ADDR=$(scontrol show node \"$_head\" --oneliner 2>/dev/null | sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p')",
    "case $MASTER_ADDR in",
    "    '' | *[!0-9.]*) MASTER_ADDR=$(getent ahostsv4 \"${MASTER_ADDR:-$_head}\" | awk '$1 !~ /^127\\./ {print $1; exit}') ;;",
    "esac",
    "[ -n \"$MASTER_ADDR\" ] || MASTER_ADDR=$(hostname -I | tr ' ' '\\n' | grep -v '^127\\.' | head -n 1)",
    "MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))",
    "# The kernel's list of sockets: 0A is one that listens, at whichever of this node's addresses.",
    'taken() { grep -qE ":$(printf %04X "$MASTER_PORT") [0-9A-F]+:[0-9A-F]{4} 0A " /proc/net/tcp /proc/net/tcp6 2>/dev/null; }',
    "while taken; do",
    '    echo "port $MASTER_PORT of $_head is in use"; MASTER_PORT=$((MASTER_PORT + 1))',
    "done",
    "export MASTER_ADDR MASTER_PORT",
]


_WATCH = [
    "# Where a node couldn't start its task, as one that doesn't see this folder, srun waits for the others for ever.",
    "(",
    "    for _ in $(seq 60); do",
    "        sleep 5",
    "        kill -0 $$ || break",
    '        _failed=$(said "task.* launch failed") || continue',
    '        echo "$_failed" >"$NEMO2_LIFE/task-srun.out"; kill "$_running"; break',
    "    done",
    ") >/dev/null 2>&1 &",
    "_watching=$!",
]


def _step(job: Job) -> list[str]:
    """The step with the ranks, in the background. Bash expands none of the user's values."""
    tasks = f"--ntasks-per-node={job.devices if job.starter == 'srun' else 1}"
    words = ["srun", f"--nodes={job.nodes}", tasks, "--kill-on-bad-exit=1", "--cpu-bind=none"]
    lines = [" ".join([*words, '--output="$NEMO2_LIFE/task-%t.out"', '--error="$NEMO2_LIFE/task-%t.out"']) + " \\"]
    lines += [f"    {option} \\" for option in (*_container(job), *map(shlex.quote, job.srun_args))]
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
    again = 'scontrol requeue "$SLURM_JOB_ID"' if job.requeue else ":"
    second = _SECOND_JUDGE.replace("@judge", _JUDGE).replace("@again", again).replace("@retries", _retries(job))
    command = f"{second}cd {workdir} && {command}"
    last = f'ranks "$_python" {job.nodes} {job.devices} {shlex.quote(job.program)} "$_folder" &'
    return [*lines, f"    bash -c {shlex.quote(command)} {last}"]


def _nsys(job: Job) -> str:
    """The prefix of the command of a node or of a task. "": without nsys. Its recordings are in the life's folder."""
    if not job.nsys:
        return ""
    # One file per traced process: nsys replaces %p by the process id.
    output = '-o "$NEMO2_LIFE/nsys_profile/node$SLURM_NODEID-%p" '
    return f"nsys {' '.join(map(shlex.quote, job.nsys))} {output}"


def _container(job: Job) -> list[str]:
    """The options of srun, quoted, that run a step in the job's container."""
    if not job.container_image:
        return []
    mounts = ",".join(dict.fromkeys([f"{job.folder}:{job.folder}", *job.container_mounts]))
    return [
        shlex.quote(f"--container-image={job.container_image}"),
        f"--container-mounts={shlex.quote(mounts)}",
        "--no-container-mount-home",
    ]


def _retries(job: Job) -> str:
    return "" if job.retries is None else f" --retries {job.retries}"


def _end(job: Job) -> list[str]:
    """The function that ends a life by a verdict: done, to be continued, or failed."""
    in_container = (
        " ".join(["srun --nodes=1 --ntasks=1 --overlap", *_container(job), ""]) if job.container_image else ""
    )
    judge = f'{in_container}"$_python" -m {_JUDGE}'
    return [
        "# Done, to be continued, or failed: the ranks' own words decide, and what Slurm has decided meanwhile.",
        "finish() {",
        "    _state=$(scontrol show job \"$SLURM_JOB_ID\" --oneliner 2>/dev/null | sed -n 's/.* JobState=\\([A-Z_]*\\).*/\\1/p')",
        "    # While a job is completing, its state doesn't say why; slurmd's own line does, unless a user cancelled it.",
        '    _why=$(said "JOB $SLURM_JOB_ID ON .* CANCELLED AT" | tail -n 1)',
        '    case "$_why" in',
        "        *NODE*FAIL*) _state=NODE_FAIL ;;",
        "        *PREEMPT*) _state=PREEMPTED ;;",
        "        *REQUEUE*) _state=REQUEUED ;;",
        '        "" | *"DUE TO"*) ;;',
        "        *) _state=CANCELLED ;;",
        "    esac",
        f'    _verdict=$({judge} "$_folder" --life "$_life" --state "${{_state:-RUNNING}}"{_retries(job)} "$@" | tail -n 1)',
        '    case "$_verdict" in',
        "        done | again | failed | cancelled) ;;",
        "        *)  # nothing judges, as without its Python: the job starts again, but not for ever",
        '            echo >"$NEMO2_LIFE/unjudged"',
        "            _verdict=again",
        f'            [ "$(ls "$_folder/{LIVES}"/*/unjudged | wc -l)" -lt {MOST_UNJUDGED} ] || _verdict=failed',
        f'            echo "$_python -m {_JUDGE} has not judged this start; its error stands above" ;;',
        "    esac",
        '    echo "life $_life: $_verdict"',
        '    case "$_verdict" in',
        "        again)",
        *(_REQUEUE if job.requeue else ()),
        "            exit 143 ;;",
        "    esac",
        '    [ -f "$_folder/chain" ] && scancel $(grep -vx "$SLURM_JOB_ID" "$_folder/chain") 2>/dev/null',
        '    [ "$_verdict" = done ]; exit',
        "}",
    ]


_REQUEUE = (
    "            trap - TERM",
    '            case "$_state" in RUNNING | "") scontrol requeue "$SLURM_JOB_ID" && sleep 300 ;; esac',
)


_SECOND_JUDGE = r"""if [ "$SLURM_PROCID" = 0 ] && command -v scontrol >/dev/null; then (
    # The job ends with its script. Where something has killed that, the ranks have the seconds of KillWait to save, and
    # this process has them to judge in the script's place.
    trap : TERM
    [ "$SLURMD_NODENAME" = "$NEMO2_SCRIPT_NODE" ] && kill -0 "$NEMO2_SCRIPT" || exit  # seen from a container, say
    while kill -0 $$ && kill -0 "$NEMO2_SCRIPT"; do sleep 5 & wait $!; done
    kill -0 $$ || exit
    # Slurm itself has ended the job.
    tail -c +$((NEMO2_WRITTEN + 1)) "$5/job-$SLURM_JOB_ID.out" | grep -aq "JOB $SLURM_JOB_ID ON .* CANCELLED AT" && exit
    verdict=$("$1" -m @judge "$5" --life "${NEMO2_LIFE##*/}" --cause script@retries 2>&1 | tail -n 1)
    if [ "$verdict" = again ]; then @again; fi
) 2>/dev/null & fi
"""
"""What the first rank's node does where the job's script is killed. Without it such a job ends for good."""
