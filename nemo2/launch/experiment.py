# SPDX-License-Identifier: Apache-2.0
"""Runs a recipe through a nemo-run experiment: on this machine, and on engines for which nemo2 has no code of its own.

`nemo_run.run` returns None and exits 0 however the run ended. This module uses the same experiment, executor and
runner, and then checks how the run ended.
"""

import contextlib
import logging
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import fiddle as fdl
import nemo_run
from nemo_run.config import get_nemorun_home

from nemo2.base.advice import again
from nemo2.base.errors import EXIT_PREEMPTED, ConfigError
from nemo2.base.variables import environment
from nemo2.config.serialize import to_json
from nemo2.launch.failure import explain_failure
from nemo2.launch.local import (
    child_processes,
    claim_staging,
    keep_private,
    rank_variables,
    split_secrets,
    stop_processes,
    sweep_staging,
)
from nemo2.launch.packagers import check_packaged_commit
from nemo2.launch.rank import MAIN
from nemo2.launch.rank_files import with_arguments
from nemo2.launch.request import LaunchRequest
from nemo2.launch.result import RunResult, Status
from nemo2.launch.signals import own_signals, raise_on_signals
from nemo2.launch.stream import RunDisplay
from nemo2.launch.trusted_files import KERNEL_CACHE, refuse_untrusted_kernel_cache
from nemo2.training.run_dir.directory import (
    RUN_DIR_FILE_VARIABLE,
    VERSION_VARIABLE,
    create_directory,
    timestamp,
    writing_to,
)
from nemo2.training.run_dir.faults import FAULT_DIR_VARIABLE, read_faults
from nemo2.training.run_dir.parent_watchdog import LAUNCHER_VARIABLE, process_identity
from nemo2.training.run_dir.records import RECIPE_FILE, RECIPE_VARIABLE
from nemo2.training.run_dir.waiting import waiting_line

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


def on_experiment(request: LaunchRequest) -> RunResult:
    """Run a recipe on its executor and follow it, or print what would be started, with the reasons of its settings. Changes the
    executor."""
    started = time.monotonic()
    recipe, executor, name, experiment_id = request.recipe, request.executor, request.name, request.experiment_id
    dryrun, detach = request.dryrun, request.detach
    local = isinstance(executor, nemo_run.LocalExecutor)
    if type(executor).__name__.startswith("Skypilot"):
        _fix_skypilot_dry_run()
    if not local:
        check_packaged_commit(executor)
    staging = Path(get_nemorun_home()) / "nemo2" / experiment_id
    create_directory(staging, field="NEMORUN_HOME")
    staging.chmod(0o700)  # it holds the user's settings
    with writing_to(staging, field="NEMORUN_HOME"):
        if not detach:
            claim_staging(staging)
        sweep_staging(staging.parent)
        secrets = prepare_executor(executor, staging=staging)
        (staging / RECIPE_FILE).write_text(to_json(recipe), encoding="utf-8")
    if local and not detach:
        executor.env_vars[LAUNCHER_VARIABLE] = process_identity()
    if dryrun:  # a dry run prints its folder
        executor.env_vars |= {name: f"${name}" for name in split_secrets(executor.env_vars)[1]}
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
    with own_signals(), environment(secrets), experiment:
        try:
            experiment.add(recipe, name=name, tail_logs=not local)
        except AssertionError as error:  # as DGX Cloud's, whose volumes don't have the job's folder
            raise ConfigError(f"{type(executor).__name__} refuses the run: {error}") from error
        if dryrun:
            experiment.dryrun(log=False)
            shutil.rmtree(staging, ignore_errors=True)
            # Unwrapped: nemo-run's own dry run breaks the lines of a job at the terminal's width.
            jobs = (str(getattr(job, "_dryrun_info", "")) for job in experiment.jobs)
            print(describe(executor, name) if local else "\n".join(jobs))
            if request.reasons:
                print("\n".join(["because", *(f"  {line}" for line in request.reasons)]))
            return request.result("dryrun")
        if local:
            refuse_untrusted_kernel_cache(executor.env_vars.get(KERNEL_CACHE))
        before = child_processes()
        experiment.run(detach=detach)
        # torchx has installed its own handlers, which neither act like Ctrl-C nor end the ranks.
        raise_on_signals()
        if detach and getattr(experiment, "detach", False):
            return request.result("submitted")
        log_dir = Path(experiment.jobs[0].executor.job_dir)
        if not local:  # nemo-run shows the log
            for job in experiment.jobs:
                job.wait()
        with waiting_line("starting: the ranks load torch and Megatron-Core", after=0):
            state = _follow(experiment, log_dir, before, faults=staging / "faults") if local else _status(experiment)
    file = staging / "run_dir"
    run_dir = Path(file.read_text(encoding="utf-8")) if file.is_file() else None
    facts = {"log_dir": log_dir, "run_dir": run_dir, "seconds": time.monotonic() - started}
    failure = None if state == "SUCCEEDED" else explain_failure(fault_dir=staging / "faults", log_dir=log_dir)
    shutil.rmtree(staging, ignore_errors=True)
    if failure is None:
        return request.result("succeeded", **facts)
    status: Status = "cancelled" if state == "CANCELLED" else "failed"
    code = EXIT_PREEMPTED if failure.exit_code == EXIT_PREEMPTED else 1
    return request.result(status, code, failure=failure, **facts)


def _fix_skypilot_dry_run() -> None:
    """Let nemo-run's dry run find the function that prints a task.

    SkyPilot 0.10.3 moved the function to `sky.utils.yaml_utils`. nemo-run 0.11.1 uses the new place in its submission
    but not in its dry run, which fails with an AttributeError.
    """
    from sky.utils import common_utils, yaml_utils

    if not hasattr(common_utils, "dump_yaml_str"):
        common_utils.dump_yaml_str = yaml_utils.dump_yaml_str


def prepare_executor(executor: Any, *, staging: Path) -> dict[str, str]:
    """Give ``executor`` the variables of this run. Returns the variables to pass on in memory only."""
    variables, secrets = split_secrets(executor.env_vars)
    if not isinstance(executor, nemo_run.LocalExecutor):
        # Paths of this machine don't exist on a cluster. The version that both have agreed on does.
        if secrets:
            print(
                f"warning: {', '.join(sorted(secrets))} will be written into the job's script, because "
                f"{type(executor).__name__} passes variables in this way. Store them in the cluster's secret store "
                "instead.",
                file=sys.stderr,
            )
        executor.env_vars = {VERSION_VARIABLE: timestamp(), **executor.env_vars}
        return {}
    ours = {
        FAULT_DIR_VARIABLE: str(staging / "faults"),
        VERSION_VARIABLE: timestamp(),
        RECIPE_VARIABLE: str(staging / RECIPE_FILE),
        RUN_DIR_FILE_VARIABLE: str(staging / "run_dir"),
    }
    ranks = executor.nproc_per_node()
    executor.env_vars = ours | rank_variables(ranks=ranks, staging=staging, requested=variables)
    return secrets


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


def _follow(experiment: Any, log_dir: Path, before: set[int], *, faults: Path) -> str:
    """Show the run until it ends. Returns nemo-run's word for its end.

    If this process is interrupted, the ranks are ended. ``before`` are the child processes that existed before them, and
    ``faults`` is the folder of the ranks' errors.
    """
    display = RunDisplay(log_dir)
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
        # before the display closes, which then shows what they saved
        with contextlib.suppress(OSError):  # the terminal may be closed
            print("ending the ranks; press Ctrl-C again to kill them", file=sys.stderr, flush=True)
        stop_processes(child_processes() - before)
        display.close(succeeded=False)
        if not display.trained and not any(fault.step for fault in read_faults(faults)):
            message = f"No step was finished, so nothing was trained or saved. To start again, run: {again()}"
            print(message, file=sys.stderr, flush=True)
        raise
    display.close(succeeded=status == "SUCCEEDED")
    return status


def _status(experiment: Any) -> str:
    states = [
        str(getattr(job["status"], "name", job["status"])) for job in experiment.status(return_dict=True).values()
    ]
    return next((state for state in states if state != "SUCCEEDED"), "SUCCEEDED")
