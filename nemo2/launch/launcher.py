# SPDX-License-Identifier: Apache-2.0
"""`launch` and `run`: a recipe through nemo-run, followed to its end, with the failure of any rank raised here.

`nemo_run.run` returns None and exits 0 whatever became of the run. These two go through the same experiment, executor
and runner, then look at how it ended.
"""

import contextlib
import copy
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import nemo_run
from nemo_run.config import get_nemorun_home

from nemo2.config.serialize import to_json
from nemo2.errors import EXIT_PREEMPTED, ConfigError, RuntimeFault
from nemo2.launch.clusters import named
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
from nemo2.launch.plugins import Plugins, apply, made
from nemo2.launch.result import RunResult, Status
from nemo2.launch.shape import give_shape
from nemo2.launch.slurm.run import on_slurm
from nemo2.launch.slurm.start import ClusterSettings
from nemo2.launch.stream import RunDisplay
from nemo2.names import safe_name
from nemo2.run_dir.directory import RUN_DIR_FILE_VARIABLE, VERSION_VARIABLE, create_directory, timestamp
from nemo2.run_dir.faults import FAULT_DIR_VARIABLE
from nemo2.run_dir.logger import RECIPE_VARIABLE
from nemo2.run_dir.orphans import LAUNCHER_VARIABLE, name_of_this_process
from nemo2.settle.machine import Machine
from nemo2.settle.world import World, world_of

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_ENDED = {"SUCCEEDED", "FAILED", "CANCELLED"}


def launch(
    recipe: Any,
    executor: Any = None,
    *,
    devices: int | None = None,
    nodes: int | None = None,
    name: str | None = None,
    dryrun: bool = False,
    detach: bool = False,
    env: Mapping[str, str] | None = None,
    chain: int = 1,
    gpu: str | None = None,
    plugins: Plugins = None,
    check: bool = True,
    force: bool = False,
    raise_on_failure: bool = True,
) -> RunResult:
    """Run ``recipe`` on ``executor`` and wait for its end.

    Args:
        recipe: a `run.Partial` such as ``llm.llama3_8b.pretrain_recipe()``; it is not changed.
        executor: a nemo-run executor, or the name of a profile (`nemo2.launch.clusters`); None or "local" is torchrun on this
            machine.
        devices: processes per node; sets ``trainer.devices`` and the executor's tasks per node. None takes the
            recipe's.
        nodes: sets ``trainer.num_nodes`` and the executor's nodes. None takes the recipe's.
        name: the run's name; sets ``log.name``. None takes the recipe's.
        dryrun: check everything, print what would be started, start nothing.
        detach: return once the run is submitted, on executors that can (Slurm and other clusters).
        env: variables for the ranks. Those that look like secrets are handed over without being written to disk on
            this machine, and to Slurm in a file of mode 0600.
        chain: Slurm: this many jobs, each after the one before, for queues with short limits; all go on with one run, and those
            that it doesn't need are cancelled.
        gpu: the GPUs it will run on ("H100", "B200"), from which launch-time variables follow
            (`nemo2.launch.environment`). None: this machine's, or Hopper's on another executor.
        plugins: nemo-run plugins (`nemo2.plugins`), or their configs; each edits the copies of recipe and executor that this run
            has, in turn, before the checks.
        check: refuse a recipe that cannot work before anything is started, or that does not fit its GPUs by far.
        force: start the one that does not fit all the same.
        raise_on_failure: False returns a result with ``status="failed"`` instead of raising.

    Returns:
        How it ended.

    Raises:
        ConfigError: the recipe or the arguments are wrong; nothing was started.
        RankFailure: a rank failed; the message has the first error.
        KeyboardInterrupt: Ctrl-C; the ranks have been ended. On Slurm they go on.
    """
    if FAULT_DIR_VARIABLE in os.environ:
        raise RuntimeFault(
            "launch() was called by a process that a launch has started. nemo-run loads the launching script in every "
            'rank: put the launch under `if __name__ == "__main__":`.'
        )
    recipe = copy.deepcopy(recipe)
    chosen = devices is not None
    executor, settings = named(executor)
    if isinstance(chain, bool) or not isinstance(chain, int) or chain < 1:
        raise ConfigError(f"chain={chain!r} must be a positive whole number of jobs.")
    if chain > 1 and not isinstance(executor, nemo_run.SlurmExecutor):
        raise ConfigError(f"chain={chain}: only Slurm runs jobs one after another; leave it out.")
    local = executor in (None, "local") or isinstance(executor, nemo_run.LocalExecutor)
    machine = machine_of(executor, gpu or (settings.gpu if settings else "") or None, local=local)
    devices, nodes, name = apply_shape(recipe, machine, devices=devices, nodes=nodes, name=name)
    title = safe_name(name)
    experiment_id = f"{title}_{time.time_ns()}"
    edited: list[str] = []
    if chosen_plugins := made(plugins):
        executor = nemo_run.LocalExecutor(launcher="torchrun") if executor in (None, "local") else executor.clone()
        give_shape(executor, devices=devices, nodes=nodes)
        edited = apply(chosen_plugins, recipe, executor, experiment_id=experiment_id)
        devices, nodes, name = apply_shape(recipe, machine, devices=None, nodes=None, name=name)
    if check:
        from nemo2.checks import check_recipe

        check_recipe(recipe, devices=devices, nodes=nodes, machine=machine, local=local, chosen=chosen)
        _refuse_too_large(recipe, machine, force=force)
    started = time.monotonic()
    if isinstance(executor, nemo_run.SlurmExecutor):
        executor = executor.clone()
        told = set_variables(executor, recipe, machine, devices=devices, nodes=nodes)
        result = on_slurm(
            recipe,
            executor,
            settings or ClusterSettings(),
            name=title,
            experiment_id=experiment_id,
            devices=devices,
            nodes=nodes,
            env=env or {},
            chain=chain,
            dryrun=dryrun,
            detach=detach,
            reasons=([*edited, *told[0]], told[1]),
        )
        if result.failure is not None and raise_on_failure:
            raise result.failure
        return result
    staging = Path(get_nemorun_home()) / "nemo2" / experiment_id
    create_directory(staging, field="NEMORUN_HOME")
    staging.chmod(0o700)  # it holds what the user has set
    if not detach:
        (staging / LAUNCHER_FILE).write_text(name_of_this_process(), encoding="utf-8")
    sweep_staging(staging.parent)
    executor, secrets = prepare_executor(executor, devices=devices, nodes=nodes, staging=staging, env=env or {})
    if local and not detach:
        executor.env_vars[LAUNCHER_VARIABLE] = name_of_this_process()
    if dryrun:  # which is there to be shown
        executor.env_vars |= {name: f"${name}" for name in split_secrets(executor.env_vars)[1]}
    reasons, warned = set_variables(executor, recipe, machine, devices=devices, nodes=nodes)
    for sentence in warned:
        print(f"warning: {sentence}", file=sys.stderr)
    (staging / "recipe.json").write_text(to_json(recipe), encoding="utf-8")
    keep_private(Path(get_nemorun_home()) / "experiments" / title)
    experiment = nemo_run.Experiment(
        title,
        executor=executor,
        id=experiment_id,
        log_level="WARNING",
        clean_mode=local,
        enable_goodbye_message=False,
        skip_status_at_exit=True,
    )
    with _own_signals(), _variables(secrets), experiment:
        experiment.add(recipe, name=title, tail_logs=not local)
        if dryrun:
            experiment.dryrun(log=not local)
            remove_quietly(staging)
            if local:
                print(describe(executor, title))
            if lines := [*edited, *reasons]:
                print("\n".join(["because", *(f"  {line}" for line in lines)]))
            return RunResult(status="dryrun", exit_code=0, experiment_id=experiment_id)
        before = child_processes()
        experiment.run(detach=detach)
        # torchx has put its own handlers in place, which neither look like Ctrl-C nor end the ranks.
        _raise_on_signals()
        if detach and getattr(experiment, "detach", False):
            return RunResult(status="submitted", exit_code=0, experiment_id=experiment_id)
        log_dir = Path(experiment.jobs[0].executor.job_dir)
        try:
            status = _follow(experiment, log_dir) if local else _wait(experiment)
        except BaseException:
            if local:
                _end_ranks(before)
            raise
    run_dir = _read_run_dir(staging)
    seconds = time.monotonic() - started
    result = {"experiment_id": experiment_id, "log_dir": log_dir, "run_dir": run_dir, "seconds": seconds}
    if status == "SUCCEEDED":
        remove_quietly(staging)
        return RunResult(status="succeeded", exit_code=0, **result)
    failure = explain_failure(fault_dir=staging / "faults", log_dir=log_dir)
    remove_quietly(staging)
    if raise_on_failure:
        raise failure
    state: Status = "cancelled" if status == "CANCELLED" else "failed"
    code = EXIT_PREEMPTED if failure.exit_code == EXIT_PREEMPTED else 1
    return RunResult(status=state, exit_code=code, failure=failure, **result)


def run(
    recipe: Any,
    executor: Any = None,
    *,
    name: str = "",
    dryrun: bool = False,
    detach: bool = False,
    plugins: Plugins = None,
) -> RunResult | None:
    """`nemo_run.run` with an honest end: raises when a rank fails, returns how it ended.

    Without an executor the recipe runs in this process, as with nemo-run, and None is returned. With one, its tasks per
    node and nodes are what the run has; ``trainer.devices`` and ``trainer.num_nodes`` follow them.

    Raises:
        ConfigError: plugins without an executor, which nemo-run forgets; as `launch`.
        RankFailure: as `launch`.
    """
    if executor is None:
        if plugins:
            raise ConfigError(
                "plugins edit an executor, and run() without one runs in this process: pass executor=run.LocalExecutor(launcher="
                "'torchrun')."
            )
        nemo_run.run(recipe, name=name, dryrun=dryrun)
        return None
    return launch(
        recipe,
        executor,
        devices=executor.nproc_per_node(),
        nodes=executor.nnodes(),
        name=name or None,
        dryrun=dryrun,
        detach=detach,
        plugins=plugins,
    )


def _refuse_too_large(recipe: Any, machine: Machine, *, force: bool) -> None:
    """Raise ConfigError for a recipe that does not fit its GPUs by far; warn of one that is close, or whose GPUs aren't known."""
    from nemo2.planner.quick import quick_verdict

    quick = quick_verdict(recipe, machine)
    if quick is None or quick.answer == "fits":
        return
    said = f"the run's memory: {quick.sentence()}."
    if quick.answer == "does not fit" and not quick.assumed and not force:
        raise ConfigError(
            f"{said[0].upper()}{said[1:]} `nemo2 rehearse` counts it to the byte and looks for a change that makes it fit; "
            "--force (launch(force=True)) starts it all the same."
        )
    print(f"warning: {said} `nemo2 rehearse` counts it to the byte.", file=sys.stderr)


def machine_of(executor: Any, gpu: str | None, *, local: bool) -> Machine:
    """The machine of an executor: this machine, or nodes of as many GPUs as it says, 8 where it doesn't.

    Raises:
        ConfigError: an unknown ``gpu``.
    """
    machine = Machine() if gpu is None else Machine.named(gpu, option="gpu=")
    if local:
        here = Machine.here()
        return (
            here if gpu is None else replace(here, accelerator="cuda", gpu=machine.gpu, capability=machine.capability)
        )
    return replace(machine, per_node=getattr(executor, "gpus_per_node", None) or machine.per_node, count=None)


def apply_shape(
    recipe: Any, machine: Machine, *, devices: int | None, nodes: int | None, name: str | None
) -> tuple[int, int, str]:
    """Write devices, nodes and name into ``recipe`` where given; what then holds on ``machine``, with 1 for what nobody says.

    "auto" and the like become a number, so that all ranks read the same.

    Raises:
        ConfigError: ``devices`` or ``nodes``, or the trainer's, are no numbers of them.
    """
    for field, value in (("devices", devices), ("nodes", nodes)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"{field}={value!r} must be a positive whole number.")
    trainer = _get(recipe, "trainer")
    log = _get(recipe, "log")
    if trainer is not None:
        if devices is not None:
            trainer.devices = devices
        if nodes is not None:
            trainer.num_nodes = nodes
    if name is not None:
        safe_name(name)
        if log is not None:
            log.name = name
    world = World(nodes or 1, devices or 1) if trainer is None else world_of(trainer, machine)
    if trainer is not None and (trainer.devices == -1 or not isinstance(trainer.devices, int | list | tuple)):
        trainer.devices = world.devices
    target = getattr(recipe, "__fn_or_cls__", None)
    return (
        world.devices,
        world.nodes,
        name or _get(log, "name") or getattr(target, "__name__", "run"),
    )


def prepare_executor(
    executor: Any, *, devices: int, nodes: int, staging: Path, env: Mapping[str, str]
) -> tuple[Any, dict[str, str]]:
    """A copy of ``executor`` with the shape and variables of this run, and the variables to pass on in memory only."""
    local = executor in (None, "local")
    executor = nemo_run.LocalExecutor(launcher="torchrun") if local else executor.clone()
    give_shape(executor, devices=devices, nodes=nodes)
    ours = {FAULT_DIR_VARIABLE: str(staging / "faults"), VERSION_VARIABLE: timestamp()}
    if not isinstance(executor, nemo_run.LocalExecutor):
        # Paths of this machine mean nothing to a cluster; the agreed version does.
        given = {**executor.env_vars, **env}
        if written := sorted(split_secrets(given)[1]):
            print(
                f"warning: {', '.join(written)} will stand in the job's script, where {type(executor).__name__} writes its "
                "variables; have the cluster's own store of secrets set them instead.",
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
    """The command that would be started on this machine, for reading."""
    variables = "".join(f"  {name}={value}\n" for name, value in sorted(executor.env_vars.items()))
    launcher = executor.get_launcher()
    under = f"nsys profile -t {','.join(launcher.nsys_trace)} ... " if launcher.nsys_profile else ""
    starter = "ft_launcher" if isinstance(launcher, nemo_run.FaultTolerance) else "torchrun"
    return (
        f"would run {title!r} in {Path.cwd()}:\n"
        f"  {under}{starter} --nnodes {executor.nnodes()} --nproc-per-node {executor.nproc_per_node()} "
        f"-m nemo_run.core.runners.fdl_runner --name {title} <recipe>\nwith\n{variables}".rstrip()
    )


def _follow(experiment: Any, log_dir: Path) -> str:
    """Show the run until it ends; nemo-run's name for how."""
    display = RunDisplay(log_dir)
    interval, next_look, status = 0.2, 0.0, "UNKNOWN"
    try:
        while status not in _ENDED:
            display.poll()
            if time.monotonic() >= next_look:
                status = _status(experiment)
                # nemo-run rewrites a file at every look; a run of days needs no five looks a second.
                next_look = time.monotonic() + interval
                interval = min(interval * 1.05, 2.0)
            time.sleep(0.1)
    finally:
        display.close(succeeded=status == "SUCCEEDED")
    return status


def _wait(experiment: Any) -> str:
    """Wait for a run elsewhere; nemo-run shows its log."""
    for job in experiment.jobs:
        job.wait()
    return _status(experiment)


def _status(experiment: Any) -> str:
    states = [
        str(getattr(job["status"], "name", job["status"])) for job in experiment.status(return_dict=True).values()
    ]
    return next((state for state in states if state != "SUCCEEDED"), "SUCCEEDED")


def _end_ranks(before: set[int]) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone
        print("ending the ranks; press Ctrl-C again to kill them", file=sys.stderr, flush=True)
    stop_processes(child_processes() - before)


def _read_run_dir(staging: Path) -> Path | None:
    file = staging / "run_dir"
    return Path(file.read_text(encoding="utf-8")) if file.is_file() else None


def _get(node: Any, name: str) -> Any:
    """A field of a config, None where it is missing or unset."""
    if node is None:
        return None
    try:
        return getattr(node, name)
    except (AttributeError, ValueError):
        return None


@contextmanager
def _variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Variables of this process for a while; what it starts inherits them."""
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


@contextmanager
def _own_signals() -> Iterator[None]:
    """Put the signals that end a run back as they were afterwards, whoever changed them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _raise_on_signals() -> None:
    """SIGINT raises KeyboardInterrupt, the others SystemExit with 128 and their number, so that the ranks are ended on the way
    out. What ``nohup`` has told this process to ignore stays so."""
    if threading.current_thread() is not threading.main_thread():
        return

    def terminate(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in _ENDING[1:]:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, terminate)
