# SPDX-License-Identifier: Apache-2.0
"""Runs a recipe on Slurm: its job's folder and script, the submission, and the following of the run until it is done,
failed or left.

The executor is nemo-run's ``SlurmExecutor``. nemo2 reads its fields but does not use its script (see `script`).
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple, Optional

from nemo_run.config import get_nemorun_home
from nemo_run.core.execution.launcher import FaultTolerance, Launcher, Torchrun
from nemo_run.core.packaging.git import GitArchivePackager

from nemo2.base.advice import print_warning
from nemo2.base.errors import ConfigError
from nemo2.base.import_path import own_folders, path_variables, requested_path, write_hook
from nemo2.base.place import PORT
from nemo2.config.walk import callbacks_of, select
from nemo2.launch.environment import RESTARTS
from nemo2.launch.executor_ranks import launcher_of
from nemo2.launch.local import split_secrets
from nemo2.launch.packagers import check_packaged_commit
from nemo2.launch.rank_files import rank_files
from nemo2.launch.request import LaunchRequest
from nemo2.launch.slurm import queue
from nemo2.launch.slurm.job_result import RUN_DIR
from nemo2.launch.slurm.script import SCRIPT, SECRETS, Job, Starter, job_script
from nemo2.launch.slurm.settings import ClusterSettings, limit_seconds
from nemo2.launch.slurm.shell import Shell, shell_of
from nemo2.launch.slurm.ship import ship
from nemo2.launch.slurm.submission import Submission
from nemo2.training.run_dir.directory import DEFAULT_BASE, RUN_DIR_FILE_VARIABLE, VERSION_VARIABLE, timestamp
from nemo2.training.run_dir.preemption import PreemptionCallback, signal_of
from nemo2.training.run_dir.records import RECIPE_FILE, RECIPE_VARIABLE

_DIRECTIVES = (
    "account", "partition", "qos", "mem", "mem_per_gpu", "mem_per_cpu", "comment", "constraint", "exclude", "gres",
    "gpus_per_node", "gpus_per_task", "cpus_per_task", "cpus_per_gpu", "segment", "network", "signal",
)  # fmt: skip
_REFUSED = {
    "array": "every task of an array would write to the same run directory. Launch once per value instead",
    "heterogeneous": "all ranks of a run do the same",
    "het_group_indices": "all ranks of a run do the same",
    "dependencies": "set additional_parameters={'dependency': 'afterok:123'} instead",
}
_OWN_OPTIONS = {
    **dict.fromkeys(("nodes", "ntasks", "ntasks-per-node"), "name the numbers in the launch (nodes, devices)"),
    **dict.fromkeys(("output", "error", "open-mode"), "the script reads the job's output. Set tunnel.job_dir instead"),
    **dict.fromkeys(("gpu-bind", "tres-bind"), "each rank takes its own among the GPUs of its node"),
    "time": "set SlurmExecutor.time instead",
    "signal": "set SlurmExecutor.signal instead",
    "array": _REFUSED["array"],
}
"""Options that additional_parameters can't have, because the script depends on them, each with its reason."""
_OPTION = re.compile(r"[a-z][a-z0-9-]*\Z")
_MONITORED = (
    "workload_check_interval", "initial_rank_heartbeat_timeout", "rank_heartbeat_timeout", "rank_termination_signal", "log_level",
)  # fmt: skip
_NEMO_RUNS_TIME = "00:10:00"
_MIN_GRACE, _MOST_GRACE, _WRITE_BYTES_PER_SECOND = 60, 3600, 0.5e9


def prepare(request: LaunchRequest, settings: ClusterSettings) -> tuple[Job, dict[str, str]]:
    """The job of a recipe, and the variables that are not in its script. Sets the directory of runs in the recipe.

    Raises:
        ConfigError: the executor asks for something that a run can't have.
    """
    recipe, executor, nodes = request.recipe, request.executor, request.nodes
    shell, names = shell_of(executor.tunnel), {"name": request.name, "experiment_id": request.experiment_id}
    job = job_of(executor, settings, devices=request.devices, nodes=nodes, **names)
    runs = _set_run_directory(recipe, settings, shell, job.folder)
    early = _Signal.of(executor.signal or "")
    limit = limit_seconds(job.time)
    if early and limit is not None and early.seconds >= limit:
        raise ConfigError(
            f"SlurmExecutor.signal={executor.signal!r}: at a time limit of {limit} s, the job would be asked to save when it "
            "starts. Set fewer seconds (preempt_time of PreemptionPlugin), or a longer time."
        )
    if early and settings.grace_seconds is not None:
        print_warning(
            f"grace_seconds={settings.grace_seconds} has no effect beside SlurmExecutor.signal={executor.signal!r}."
        )
    _warn_of_unhandled_signal(recipe, executor.signal or "")
    if job.starter == "torchrun" and executor.cpus_per_task and executor.cpus_per_task < job.devices:
        print_warning(
            f"SlurmExecutor.cpus_per_task={executor.cpus_per_task} is for all {job.devices} ranks of a node, because torchrun "
            "is one task. Set the CPUs of a node."
        )
    if executor.packager != GitArchivePackager():
        check_packaged_commit(executor)
    resumes = _resumes(recipe)
    if not resumes and request.chain > 1 and getattr(recipe, "resume", None) is not None:
        raise ConfigError(
            f"chain={request.chain}: each job would train from the beginning, because resume.resume_if_exists is not set. "
            "Set it, or remove chain."
        )
    if not resumes and (job.requeue or request.chain > 1):
        print_warning("resume.resume_if_exists is not set, so the job does not restart when it is interrupted.")
    return replace(
        job,
        variables={
            VERSION_VARIABLE: timestamp(),
            RECIPE_VARIABLE: f"{job.folder}/{RECIPE_FILE}",
            RUN_DIR_FILE_VARIABLE: f"{job.folder}/{RUN_DIR}",
            **job.variables,
            **_import_path(job.folder, job.variables, shell, settings),
        },
        workdir=str(Path.cwd()) if shell.local and not executor.container_image else f"{job.folder}/code",
        container_mounts=(*_own_mounts(recipe, runs), *executor.container_mounts),
        grace_seconds=early.seconds if early else _grace(recipe, settings, nodes=nodes, limit=limit),
        requeue=job.requeue and resumes and request.chain == 1,
    ), split_secrets(executor.env_vars)[1]


def job_of(executor: Any, settings: ClusterSettings, *, name: str, experiment_id: str, devices: int, nodes: int) -> Job:
    """The settings of a job from its executor, for any kind of job, without secret variables.

    Raises:
        ConfigError: the executor asks for something that a run can't have.
    """
    for key, why in _REFUSED.items():
        if getattr(executor, key, None):
            raise ConfigError(f"SlurmExecutor.{key}={getattr(executor, key)!r} is not supported for training: {why}.")
    shell, starter = shell_of(executor.tunnel), _starter_of(executor)
    launcher = launcher_of(executor)
    options = {key: getattr(executor, key, None) for key in _DIRECTIVES}
    directives: dict[str, Optional[str]] = {
        key.replace("_", "-"): str(value) for key, value in options.items() if value not in (None, "")
    }
    if executor.exclusive:
        directives["exclusive"] = None if executor.exclusive is True else str(executor.exclusive)
    if executor.job_name_prefix:
        directives["job-name"] = f"{executor.job_name_prefix}{name}"
    additional, requeue = _additional(executor.additional_parameters or {})
    directives |= additional
    early = _Signal.of(executor.signal or "")
    variables = split_secrets(executor.env_vars)[0]
    if isinstance(launcher, Torchrun | FaultTolerance) and launcher.rdzv_port != type(launcher)().rdzv_port:
        variables = {PORT: str(launcher.rdzv_port), **variables}
    if isinstance(launcher, FaultTolerance) and launcher.max_restarts is not None:
        variables = {RESTARTS: str(launcher.max_restarts), **variables}
    return Job(
        name=name,
        folder=f"{_jobs_dir(executor, shell)}/{name}/{experiment_id}",
        nodes=nodes,
        devices=devices,
        starter=starter,
        time=_time_limit(executor),
        directives=directives,
        variables=variables,
        setup_lines=_set_up_lines(executor.setup_lines or ""),
        python=settings.python or (sys.executable if shell.local and not executor.container_image else "python3"),
        srun_args=tuple(executor.srun_args or ()),
        container_image=executor.container_image or "",
        container_mounts=tuple(executor.container_mounts),
        container_env=tuple(dict.fromkeys([*executor.env_vars, *(executor.container_env or ())])),
        requeue=settings.requeue and requeue,
        retries=max(executor.retries, 0) if executor.retries else None,  # 0 is nemo-run's default, not a limit
        nsys=("profile", "-s", "none", "-t", ",".join(launcher.nsys_trace), *launcher.nsys_extra_args)
        if launcher.nsys_profile
        else (),
        monitor=_monitor(launcher),
        early_signal=early.name if early else "TERM",
    )


def submit(job: Job, request: LaunchRequest, settings: ClusterSettings, *, secrets: Mapping[str, str]) -> Submission:
    """Copy the job's folder to its target, and submit its script ``request.chain`` times, each job after the one before it.

    Raises:
        ConfigError: Slurm rejects the job, or its code can't be shipped.
    """
    tunnel, chain = request.executor.tunnel, request.chain
    shell = shell_of(tunnel)
    with tempfile.TemporaryDirectory() as temporary:
        staged = Path(temporary) / "job"
        staged.mkdir(mode=0o700)
        _write_job_folder(staged, job, request, settings, secrets)
        shell.place(staged, job.folder)
    jobs: list[str] = []
    try:
        for _ in range(chain):
            jobs.append(queue.submit(shell, f"{job.folder}/{SCRIPT}", after=jobs[-1] if jobs else None))
    except BaseException:  # the links so far would run without anybody's knowledge
        queue.cancel(shell, jobs)
        raise
    if chain > 1:
        shell.run(f"printf '%s\\n' {' '.join(jobs)} > {quote(job.folder)}/chain")
    ssh = {} if shell.local else {key: getattr(tunnel, key) for key in ("host", "user", "port", "identity")}
    submission = Submission(name=job.name, folder=job.folder, jobs=jobs, ssh=ssh)
    submission.save()
    return submission


def _starter_of(executor: Any) -> Starter:
    """The starter: a torchrun per node for ``launcher="torchrun"``, a task of srun per rank for None."""
    # A launcher of nemo-run's base class means no launcher, with nsys before the command.
    return "srun" if executor.launcher is None or type(executor.launcher) is Launcher else "torchrun"


def _additional(parameters: Mapping[str, Any]) -> tuple[dict[str, Optional[str]], bool]:
    """The options of ``additional_parameters`` by name, and whether Slurm may start the job again.

    Raises:
        ConfigError: a name that no option has, or an option on which the script depends.
    """
    options: dict[str, Optional[str]] = {}
    requeue = True
    for key, value in parameters.items():
        name, where = str(key).replace("_", "-"), f"SlurmExecutor.additional_parameters[{key!r}]={value!r}"
        if not _OPTION.match(name):
            raise ConfigError(f"{where}: sbatch has no such option. Use its name without dashes before it.")
        if name in _OWN_OPTIONS:
            raise ConfigError(f"{where} is not supported: {_OWN_OPTIONS[name]}.")
        if name in ("requeue", "no-requeue"):
            requeue = (value is not False) == (name == "requeue")
        elif value is None or value is True:
            options[name] = None
        elif value is not False:
            options[name] = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return options, requeue


class _Signal(NamedTuple):
    """``executor.signal``: the signal's name without SIG, and the seconds before the job's end at which Slurm sends it."""

    name: str
    seconds: int

    @classmethod
    def of(cls, requested: str) -> Optional["_Signal"]:
        """None: the executor requests none, or sbatch will refuse it.

        Raises:
            ConfigError: only the job's script would get it.
        """
        options, colon, rest = requested.rpartition(":")
        if colon and "B" in options.upper():
            raise ConfigError(
                f"SlurmExecutor.signal={requested!r}: with B, only the job's script gets the signal, and the ranks don't "
                f"save. Use {rest!r}."
            )
        name, _, seconds = rest.partition("@")
        known = {name.removeprefix("SIG"): name.removeprefix("SIG") for name in signal.Signals.__members__}
        known |= {str(one.value): one.name.removeprefix("SIG") for one in signal.Signals}
        name = known.get(name.upper().removeprefix("SIG"), "")
        # Slurm's default is a minute.
        return cls(name, int(seconds or 60)) if name and (seconds or "60").isdecimal() else None


def _warn_of_unhandled_signal(recipe: Any, requested: str) -> None:
    """Report a signal for which no callback is known. Without one, `PreemptionCallback` handles some by default."""
    early = _Signal.of(requested)
    callbacks = select(callbacks_of(getattr(recipe, "trainer", None)), PreemptionCallback)
    handled = {"TERM"} if callbacks else {"TERM", "USR1"}
    for callback in callbacks:
        named = getattr(callback, "sig", None) or ["SIGTERM", "SIGUSR1"]
        for one in named if isinstance(named, list) else [named]:
            handled.add(signal_of(one, owner="PreemptionCallback").name.removeprefix("SIG"))
    if early is not None and early.name not in handled:
        print_warning(
            f"SlurmExecutor.signal={requested!r}: no PreemptionCallback handles this signal, at which a rank ends "
            f"without saving. PreemptionPlugin(sig='SIG{early.name}', preempt_time={early.seconds}) sets both."
        )


def _set_up_lines(lines: str) -> str:
    """The lines, which Bash can read to their end. Otherwise they would take the script after them along.

    Raises:
        ConfigError: they are no Bash.
    """
    if lines.strip() and (bash := shutil.which("bash")):
        # On the last line, a backslash would join the line after it.
        done = subprocess.run([bash, "-n"], input=f"{lines}\n", capture_output=True, text=True, check=False)
        problem = done.stderr.strip() or (
            "the last line ends with a backslash" if lines.rstrip().endswith("\\") else ""
        )
        if problem:
            raise ConfigError(f"SlurmExecutor.setup_lines: Bash can't read them: {' '.join(problem.split())}.")
    return lines


def _monitor(launcher: Any) -> Optional[dict[str, str]]:
    """The options of nvidia-resiliency-ext's launcher. None: it isn't used."""
    if not isinstance(launcher, FaultTolerance):
        return None
    options = {name: getattr(launcher, name) for name in _MONITORED}
    return {name.replace("_", "-"): str(value) for name, value in options.items() if value is not None}


def _resumes(recipe: Any) -> bool:
    return bool(getattr(getattr(recipe, "resume", None), "resume_if_exists", False))


def _write_job_folder(
    staged: Path, job: Job, request: LaunchRequest, settings: ClusterSettings, secrets: Mapping[str, str]
) -> None:
    for name, text in {**rank_files(request.recipe), SCRIPT: job_script(job)}.items():
        (staged / name).write_text(text, encoding="utf-8")
    if secrets:
        lines = [f"export {name}={quote(value)}" for name, value in sorted(secrets.items())]
        private = os.open(staged / SECRETS, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(private, "w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
    packager = request.executor.packager
    # nemo-run's default silently ships the commit, and fails outside a repository. Here the profile decides.
    own = packager if packager is not None and packager != GitArchivePackager() else None
    leave_out = [Path(get_nemorun_home())]
    ship(Path.cwd(), staged / "code", code=settings.code, packager=own, leave_out=leave_out)
    write_hook(staged)


def _import_path(folder: str, variables: Mapping[str, str], shell: Shell, settings: ClusterSettings) -> dict[str, str]:
    """The import path of this machine (`path_variables`), with the shipped copy in place of the working directory."""
    shipped, others = [], []
    for own in map(Path, own_folders()):
        if settings.code != "none" and own.is_relative_to(Path.cwd()):
            shipped.append(str(Path(folder, "code", own.relative_to(Path.cwd()))))
        elif shell.local:
            others.append(str(own))
    requested = requested_path(variables) if shell.local else [variables.get("PYTHONPATH", "")]
    return path_variables(folder, requested=requested, own=[*shipped, *others])


def _set_run_directory(recipe: Any, settings: ClusterSettings, shell: Shell, folder: str) -> str:
    """Set an absolute directory for the run in the recipe, because ranks start in another directory than this
    process."""
    log = getattr(recipe, "log", None)
    if log is None:
        return ""
    base = Path(settings.runs or (Path.cwd() if shell.local else Path(folder).parent.parent))
    field = "explicit_log_dir" if getattr(log, "explicit_log_dir", None) else "log_dir"
    directory = getattr(log, field, None) or ("" if settings.runs else DEFAULT_BASE)
    if str(directory).startswith("~") and not shell.local:
        raise ConfigError(
            f"log.{field}={directory}: ~ is a folder of this machine. Set an absolute path on the cluster."
        )
    setattr(log, field, str(base / Path(directory).expanduser()))
    return getattr(log, field)


def _jobs_dir(executor: Any, shell: Shell) -> str:
    if job_dir := getattr(executor.tunnel, "job_dir", "") or "":
        return job_dir.rstrip("/")
    if not shell.local:
        raise ConfigError("tunnel.job_dir is empty. Set a directory on the cluster that all nodes share.")
    return str(Path(get_nemorun_home()) / "experiments")


def _own_mounts(recipe: Any, runs: str) -> tuple[str, ...]:
    """The run's folder, and the folders of the paths of its data and of the checkpoint from which it starts."""
    from fiddle import daglish

    values = [value for part in ("data", "resume") for value, _ in daglish.iterate(getattr(recipe, part, None))]
    paths = [value for value in values if isinstance(value, str) and value.startswith("/")]
    folders = [runs, *(path if Path(path).is_dir() else str(Path(path).parent) for path in paths)]
    return tuple(f"{folder}:{folder}" for folder in dict.fromkeys(folders) if folder)


def _time_limit(executor: Any) -> str:
    limit = "" if executor.time is None else str(executor.time)
    if limit == _NEMO_RUNS_TIME:
        print_warning(
            "SlurmExecutor.time is 00:10:00, nemo-run's default, so the job saves and is queued again every 10 "
            "minutes. Set a longer time."
        )
    limit_seconds(limit)
    return limit


def _grace(recipe: Any, settings: ClusterSettings, *, nodes: int, limit: Optional[int]) -> int:
    """A minute, plus the time to write weights, main weights and two moments (14 bytes per parameter) at half a GB
    per second and node. At most an hour and a quarter of the limit."""
    most = _MOST_GRACE if limit is None else min(_MOST_GRACE, limit // 4)
    if settings.grace_seconds is None:
        return min(most, _MIN_GRACE + int(14 * _parameters(recipe) / (nodes * _WRITE_BYTES_PER_SECOND)))
    if settings.grace_seconds > most:
        print_warning(
            f"grace_seconds={settings.grace_seconds} becomes {most}, at most an hour and a quarter of the job's time limit. "
            "PreemptionPlugin(preempt_time=...) sets any time."
        )
    return min(most, settings.grace_seconds)


def _parameters(recipe: Any) -> float:
    from nemo2.models.walker import shape_of

    try:
        return float(shape_of(recipe.model.config).parameters)
    except (AttributeError, TypeError, ConfigError):  # a user's model without these sizes: the minute alone
        return 0.0
