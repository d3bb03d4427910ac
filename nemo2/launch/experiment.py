# SPDX-License-Identifier: Apache-2.0
"""Runs a recipe through a nemo-run experiment: on this machine, and on engines for which nemo2 has no code of its own.

`nemo_run.run` returns None and exits 0 however the run ended. This module uses the same experiment, executor and
runner, and then checks how the run ended.
"""

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fiddle as fdl
import nemo_run
from nemo_run.config import get_nemorun_home

from nemo2.config.serialize import to_json
from nemo2.errors import EXIT_PREEMPTED
from nemo2.launch.environment import set_variables
from nemo2.launch.failure import explain_failure
from nemo2.launch.local import (
    LAUNCHER_FILE,
    child_processes,
    keep_private,
    rank_variables,
    remove_quietly,
    split_secrets,
    stop_processes,
    sweep_staging,
)
from nemo2.launch.main_script import with_arguments
from nemo2.launch.rank import MAIN
from nemo2.launch.result import RunResult, Status
from nemo2.launch.shape import give_shape
from nemo2.launch.signals import own_signals, raise_on_signals
from nemo2.launch.stream import STARTING, RunDisplay
from nemo2.launch.trusted_files import KERNEL_CACHE, refuse_untrusted_kernel_cache
from nemo2.run_dir.directory import RUN_DIR_FILE_VARIABLE, VERSION_VARIABLE, create_directory, timestamp
from nemo2.run_dir.faults import FAULT_DIR_VARIABLE
from nemo2.run_dir.logger import RECIPE_VARIABLE
from nemo2.run_dir.orphans import LAUNCHER_VARIABLE, name_of_this_process
from nemo2.settle.machine import Machine

_ENDED = {"SUCCEEDED", "FAILED", "CANCELLED"}


class _Experiment(nemo_run.Experiment):
    """nemo-run's experiment, which leaves Python's logging to the program and gives a script its arguments in ranks.

    When an experiment is created, nemo-run closes and removes every handler of the root logger and sets the logger's
    level. When the experiment is garbage-collected, nemo-run removes the root logger's first handler, even one that the
    program has added since (nemo-run 0.11.1, `Experiment.__init__` and `__del__`).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        root = logging.getLogger()
        handlers, level = root.handlers[:], root.level
        root.handlers.clear()
        try:
            super().__init__(*args, **kwargs)
        finally:
            root.handlers[:] = handlers
            root.setLevel(level)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._cleanup()

    def _save_jobs(self) -> None:
        """Save the launching script, which nemo-run loads in every rank, with the script's own arguments."""
        super()._save_jobs()
        script = Path(self._exp_dir) / MAIN
        if script.is_file():  # nemo-run has written what Python's inspect finds, of a notebook nothing
            script.write_text(with_arguments(script.read_text(encoding="utf-8"), sys.argv), encoding="utf-8")

    def to_config(self) -> Any:
        """The configuration that `nemo experiment` reads. It names nemo-run's class, because the reader may not have
        nemo2."""
        config = super().to_config()
        fdl.update_callable(config, nemo_run.Experiment)
        return config


def on_experiment(
    recipe: Any,
    executor: Any,
    *,
    name: str,
    experiment_id: str,
    devices: int,
    nodes: int,
    env: Mapping[str, str],
    machine: Machine,
    local: bool,
    dryrun: bool,
    detach: bool,
    edited: list[str],
) -> RunResult:
    """Run a recipe on ``executor`` (None or "local": torchrun on this machine) and follow it, or print what would be
    started.

    Args:
        local: whether the ranks run on this machine.
        edited: the plugins' changes, one line each.
    """
    started = time.monotonic()
    if type(executor).__name__.startswith("Skypilot"):
        from nemo2.launch.skypilot import mend_dry_runs

        mend_dry_runs()
    staging = Path(get_nemorun_home()) / "nemo2" / experiment_id
    create_directory(staging, field="NEMORUN_HOME")
    staging.chmod(0o700)  # it holds the user's settings
    if not detach:
        (staging / LAUNCHER_FILE).write_text(name_of_this_process(), encoding="utf-8")
    sweep_staging(staging.parent)
    executor, secrets = prepare_executor(executor, devices=devices, nodes=nodes, staging=staging, env=env)
    if local and not detach:
        executor.env_vars[LAUNCHER_VARIABLE] = name_of_this_process()
    if dryrun:  # a dry run prints its folder
        executor.env_vars |= {name: f"${name}" for name in split_secrets(executor.env_vars)[1]}
    reasons, warned = set_variables(executor, recipe, machine, devices=devices, nodes=nodes)
    for sentence in warned:
        print(f"warning: {sentence}", file=sys.stderr)
    (staging / "recipe.json").write_text(to_json(recipe), encoding="utf-8")
    keep_private(Path(get_nemorun_home()) / "experiments" / name)
    experiment = _Experiment(
        name,
        executor=executor,
        id=experiment_id,
        log_level="WARNING",
        clean_mode=local or dryrun,  # the output of a dry run can be pasted
        enable_goodbye_message=False,
        skip_status_at_exit=True,
    )
    with own_signals(), _variables(secrets), experiment:
        experiment.add(recipe, name=name, tail_logs=not local)
        if dryrun:
            experiment.dryrun(log=False)
            remove_quietly(staging)
            print(describe(executor, name) if local else _job_of(experiment))
            if lines := [*edited, *reasons]:
                print("\n".join(["because", *(f"  {line}" for line in lines)]))
            return RunResult(status="dryrun", exit_code=0, experiment_id=experiment_id)
        if local:
            refuse_untrusted_kernel_cache(executor.env_vars.get(KERNEL_CACHE))
        before = child_processes()
        experiment.run(detach=detach)
        # torchx has installed its own handlers, which neither act like Ctrl-C nor end the ranks.
        raise_on_signals()
        if detach and getattr(experiment, "detach", False):
            return RunResult(status="submitted", exit_code=0, experiment_id=experiment_id)
        log_dir = Path(experiment.jobs[0].executor.job_dir)
        state = _follow(experiment, log_dir, before) if local else _wait(experiment)
    result = {"experiment_id": experiment_id, "log_dir": log_dir, "run_dir": _read_run_dir(staging)}
    return _ending(state, staging, seconds=time.monotonic() - started, **result)


def _ending(state: str, staging: Path, *, log_dir: Path, **result: Any) -> RunResult:
    """The result of a run whose end nemo-run calls ``state``. Removes the run's staging files."""
    failure = None if state == "SUCCEEDED" else explain_failure(fault_dir=staging / "faults", log_dir=log_dir)
    remove_quietly(staging)
    if failure is None:
        return RunResult(status="succeeded", exit_code=0, log_dir=log_dir, **result)
    status: Status = "cancelled" if state == "CANCELLED" else "failed"
    code = EXIT_PREEMPTED if failure.exit_code == EXIT_PREEMPTED else 1
    return RunResult(status=status, exit_code=code, failure=failure, log_dir=log_dir, **result)


def prepare_executor(
    executor: Any, *, devices: int, nodes: int, staging: Path, env: Mapping[str, str]
) -> tuple[Any, dict[str, str]]:
    """A copy of ``executor`` with this run's shape and variables, and the variables to pass on in memory only."""
    local = executor in (None, "local")
    executor = nemo_run.LocalExecutor(launcher="torchrun") if local else executor.clone()
    give_shape(executor, devices=devices, nodes=nodes)
    ours = {FAULT_DIR_VARIABLE: str(staging / "faults"), VERSION_VARIABLE: timestamp()}
    if not isinstance(executor, nemo_run.LocalExecutor):
        # Paths of this machine don't exist on a cluster. The version that both have agreed on does.
        given = {**executor.env_vars, **env}
        if written := sorted(split_secrets(given)[1]):
            print(
                f"warning: {', '.join(written)} will be written into the job's script, because "
                f"{type(executor).__name__} passes variables in this way. Store them in the cluster's secret store "
                "instead.",
                file=sys.stderr,
            )
        executor.env_vars = {VERSION_VARIABLE: ours[VERSION_VARIABLE], **given}
        return executor, {}
    if executor.launcher is None:
        executor.launcher = "torchrun"
    ours |= {RECIPE_VARIABLE: str(staging / "recipe.json"), RUN_DIR_FILE_VARIABLE: str(staging / "run_dir")}
    given, secrets = split_secrets({**executor.env_vars, **env})
    executor.env_vars = ours | rank_variables(ranks=devices, staging=staging, given=given)
    return executor, secrets


def describe(executor: Any, title: str) -> str:
    """The command that would be started on this machine, formatted for reading, without the variables that are nemo2's
    own."""
    named = ((name, value) for name, value in sorted(executor.env_vars.items()) if not name.startswith("NEMO2_"))
    variables = "".join(f"  {name}={value}\n" for name, value in named)
    launcher = executor.get_launcher()
    under = f"nsys profile -t {','.join(launcher.nsys_trace)} ... " if launcher.nsys_profile else ""
    starter = "ft_launcher" if isinstance(launcher, nemo_run.FaultTolerance) else "torchrun"
    return (
        f"would run {title!r} in {Path.cwd()}:\n"
        f"  {under}{starter} --nnodes {executor.nnodes()} --nproc-per-node {executor.nproc_per_node()} "
        f"-m nemo_run.core.runners.fdl_runner --name {title} <recipe>\nwith\n{variables}".rstrip()
    )


def _job_of(experiment: Any) -> str:
    """The job that an engine would receive, unwrapped. nemo-run's own dry run breaks its lines at the terminal's
    width."""
    return "\n".join(str(getattr(job, "_dryrun_info", "")) for job in experiment.jobs)


def _follow(experiment: Any, log_dir: Path, before: set[int]) -> str:
    """Show the run until it ends. Returns nemo-run's word for its end.

    If this process is interrupted, the ranks are ended. ``before`` are the child processes that existed before them.
    """
    display = RunDisplay(log_dir, waiting=STARTING)
    interval, next_look, status = 0.2, 0.0, "UNKNOWN"
    try:
        while status not in _ENDED:
            display.poll()
            if time.monotonic() >= next_look:
                status = _status(experiment)
                # nemo-run rewrites a file at every poll, so a run of days isn't polled five times a second.
                next_look = time.monotonic() + interval
                interval = min(interval * 1.05, 2.0)
            time.sleep(0.1)
    except BaseException:
        _end_ranks(before)  # before the display closes, which then shows what they saved
        raise
    finally:
        display.close(succeeded=status == "SUCCEEDED")
    return status


def _wait(experiment: Any) -> str:
    """Wait for a run on another machine. nemo-run shows its log."""
    for job in experiment.jobs:
        job.wait()
    return _status(experiment)


def _status(experiment: Any) -> str:
    states = [
        str(getattr(job["status"], "name", job["status"])) for job in experiment.status(return_dict=True).values()
    ]
    return next((state for state in states if state != "SUCCEEDED"), "SUCCEEDED")


def _end_ranks(before: set[int]) -> None:
    with contextlib.suppress(OSError):  # the terminal may be closed
        print("ending the ranks; press Ctrl-C again to kill them", file=sys.stderr, flush=True)
    stop_processes(child_processes() - before)


def _read_run_dir(staging: Path) -> Path | None:
    file = staging / "run_dir"
    return Path(file.read_text(encoding="utf-8")) if file.is_file() else None


@contextmanager
def _variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process for a while. Child processes inherit them."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
