# SPDX-License-Identifier: Apache-2.0
"""`launch` and `run`: run a recipe on an executor, follow it to its end, and raise an exception if any rank fails."""

import copy
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import nemo_run
from nemo_run.core.execution.launcher import Launcher

from nemo2.base.advice import advice, own_data, print_warning
from nemo2.base.counts import counted, require_counts
from nemo2.base.errors import EXIT_PREEMPTED, CannotBuild, ConfigError, RuntimeFault
from nemo2.base.names import safe_name
from nemo2.checkpoint.auto_resume import refuse_unresumable
from nemo2.data.mock import is_mock
from nemo2.launch.announce import print_end, print_start
from nemo2.launch.clusters import resolve_executor
from nemo2.launch.environment import known_variables, set_variables
from nemo2.launch.executor_fields import check_fields, start_with_torchrun, text_variables, warn_of_unused_fields
from nemo2.launch.executor_ranks import launcher_of, refuse_other_ranks, set_ranks
from nemo2.launch.experiment import on_experiment
from nemo2.launch.failure import RankFailure
from nemo2.launch.plugins.apply import Plugins, apply_plugins, build_plugins
from nemo2.launch.request import LaunchRequest
from nemo2.launch.result import RunResult, Status
from nemo2.launch.slurm.follow import CONTINUED, follow, run_directory
from nemo2.launch.slurm.script import job_script
from nemo2.launch.slurm.settings import ClusterSettings
from nemo2.launch.slurm.shell import shell_of
from nemo2.launch.slurm.start import prepare, submit
from nemo2.mcore.settle.machine import Machine
from nemo2.mcore.settle.world import World, world_of
from nemo2.training.run_dir.faults import FAULT_DIR_VARIABLE

_TRIAL_STEPS = 50
"""The number of steps up to which a run counts as a trial."""


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
    quiet: bool = False,
) -> RunResult:
    """Run ``recipe`` on ``executor`` and wait for its end.

    Args:
        recipe: a `run.Partial` such as ``llm.llama3_8b.pretrain_recipe()``. It is not changed.
        executor: a nemo-run executor, or the name of a profile (`nemo2.launch.clusters`). None or "local": torchrun on
            this machine.
        devices: processes per node; sets ``trainer.devices`` and the executor's tasks per node. None: the recipe's.
        nodes: sets ``trainer.num_nodes`` and the executor's nodes. None: the recipe's.
        name: the run's name; sets ``log.name``. None: the recipe's.
        dryrun: check everything and print what would be started, without starting it.
        detach: return once the run is submitted, on Slurm and other clusters.
        env: environment variables of the ranks. Variables whose names look like secrets are not written to disk on this
            machine, and reach Slurm in a file of mode 0600.
        chain: for Slurm queues with short time limits: the number of jobs, each of which starts after the job before
            it. All jobs continue one run. Jobs that the run doesn't need are cancelled.
        gpu: the kind of GPUs that the run will use ("H100", "B200"), which decides launch-time variables
            (`nemo2.launch.environment`). None: this machine's, or Hopper on another executor.
        plugins: nemo-run plugins (`nemo2.plugins`) or their configs. Before the checks each plugin edits this run's
            copies of the recipe and the executor.
        check: before anything starts, reject a recipe that can't work or whose memory far exceeds its GPUs'.
        force: start a recipe even if its memory far exceeds its GPUs'.
        raise_on_failure: False: return a result with ``status="failed"`` instead of raising.
        quiet: leave out the block at the start, which says what runs, and the last lines, which say where the results
            are.

    Returns:
        The result of the run.

    Raises:
        ConfigError: the recipe or the arguments are wrong. Nothing was started.
        RankFailure: a rank failed. The message contains the first error.
        KeyboardInterrupt: Ctrl-C. The ranks have been ended, except on Slurm, where they continue.
    """
    if FAULT_DIR_VARIABLE in os.environ:
        raise RuntimeFault(
            "A process of a launch called launch() again, because nemo-run loads the launching script in every rank. Put "
            'the launch under `if __name__ == "__main__":`.'
        )
    recipe = copy.deepcopy(recipe)
    requested = executor
    executor, settings, machine = place_of(executor, gpu)
    executor = nemo_run.LocalExecutor() if executor in (None, "local") else executor.clone()
    check_fields(executor)
    executor.env_vars = {**executor.env_vars, **text_variables(env or {})}
    start_with_torchrun(executor)
    if detach and isinstance(executor, nemo_run.LocalExecutor):
        raise ConfigError(
            f"{advice('--detach', 'detach=True')}: a run on this machine ends with its command. Name a cluster that keeps it "
            f"({advice('--executor', 'executor')})."
        )
    require_counts("", chain=chain)
    if chain > 1 and not isinstance(executor, nemo_run.SlurmExecutor):
        raise ConfigError(f"chain={chain}: only Slurm runs jobs one after another. Remove chain.")
    if check:
        from nemo2.preflight.checks.find import check_types

        check_types(recipe)
    named_devices, named_nodes = devices, nodes
    devices, nodes, name = apply_shape(recipe, machine, devices=devices, nodes=nodes, name=name)
    refuse_other_ranks(
        executor, devices=devices if named_devices is None else None, nodes=nodes if named_nodes is None else None
    )
    title = safe_name(name)
    if not quiet:
        print_start(recipe, title, requested, machine, settings)
    experiment_id = f"{title}_{time.time_ns()}"
    reasons: list[str] = []
    if built := build_plugins(plugins):
        set_ranks(executor, devices=devices, nodes=nodes)
        reasons = apply_plugins(built, recipe, executor, experiment_id=experiment_id)
        check_fields(executor)
        devices, nodes, name = apply_shape(recipe, machine, devices=None, nodes=None, name=name)
    check_gpus(executor, recipe, devices=devices, nodes=nodes)
    reasons += set_variables(executor, recipe, machine, devices=devices, nodes=nodes)
    if check:
        from nemo2.preflight.checks import check_recipe

        check_recipe(
            recipe,
            devices=devices,
            nodes=nodes,
            machine=machine,
            local=machine.local,
            chosen=named_devices is not None,
            environment=known_variables(executor, machine),
        )
        _refuse_too_large(recipe, machine, force=force)
        if machine.local:
            _refuse_finished_run(recipe)
    _warn_of_random_data(recipe)
    warn_of_unused_fields(executor)
    set_ranks(executor, devices=devices, nodes=nodes)
    request = LaunchRequest(
        recipe=recipe,
        executor=executor,
        name=title,
        experiment_id=experiment_id,
        devices=devices,
        nodes=nodes,
        dryrun=dryrun,
        detach=detach,
        reasons=tuple(reasons),
        chain=chain,
    )
    if isinstance(executor, nemo_run.SlurmExecutor):
        result = on_slurm(request, settings or ClusterSettings())
    elif type(executor).__name__ == "KubeflowExecutor":  # importing its class needs an optional package
        from nemo2.launch.kubeflow.run import on_kubeflow

        result = on_kubeflow(request)
    else:
        result = on_experiment(request)
    if result.failure is not None and raise_on_failure:
        raise result.failure
    if not quiet:
        print_end(result)
    return result


def run(
    recipe: Any,
    executor: Any = None,
    *,
    name: str = "",
    dryrun: bool = False,
    detach: bool = False,
    plugins: Plugins = None,
) -> RunResult | None:
    """Run a recipe as `nemo_run.run` does, but raise if a rank fails and return the result.

    Without an executor the recipe runs in this process, as with nemo-run, and None is returned. With an executor, its
    nodes and tasks per node define the run's size, and ``trainer.devices`` and ``trainer.num_nodes`` follow them.

    Args:
        recipe: The recipe.
        executor: A nemo-run executor. None: run in this process.
        name: The run's name; sets ``log.name``. Empty: the recipe's.
        dryrun: Print the launch, and start nothing.
        detach: Return once the job is submitted, without waiting for its end.
        plugins: Plugins that edit the recipe and its executor. None: no plugins.

    Raises:
        ConfigError: plugins without an executor, which nemo-run would ignore; or an error of `launch`.
        RankFailure: as in `launch`.
    """
    if executor is None:
        if plugins:
            raise ConfigError(
                "plugins also edit an executor, but run() without an executor runs in this process. Pass "
                "executor=run.LocalExecutor(launcher='torchrun')."
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


def _refuse_finished_run(recipe: Any) -> None:
    """Raise the CheckpointError that every rank of this run would raise, if the run's folder on this machine shows that
    it has reached ``trainer.max_steps``, or that its only checkpoint holds weights without the optimizer."""
    from nemo2.preflight.checks.earlier import checkpoints_to_resume

    directory = checkpoints_to_resume(recipe)
    if directory is not None:
        refuse_unresumable(directory, max_steps=recipe.trainer.max_steps, past_end=recipe.resume.resume_past_end)


def _refuse_too_large(recipe: Any, machine: Machine, *, force: bool) -> None:
    """Raise ConfigError for a recipe whose memory exceeds its GPUs'. Warn if too little stays free or the GPUs are
    unknown."""
    from nemo2.preflight.planner.fit import fit_of

    try:
        fit = fit_of(recipe, machine)
    except CannotBuild as error:
        if not force:
            raise
        print_warning(str(error))
        return
    if fit is None or fit.fits:
        return
    finding = f"the run's memory: {fit.sentence()}."
    if fit.answer == "does not fit" and not fit.assumed and not force:
        raise ConfigError(
            f"{finding[0].upper()}{finding[1:]} `nemo2 rehearse` counts each part and searches for a change that makes the run "
            "fit. To start it anyway, use "
            f"{advice('--force', 'launch(recipe, force=True)')}."
        )
    print_warning(f"{finding} `nemo2 rehearse` counts each part.")


def _warn_of_random_data(recipe: Any) -> None:
    """Warn on stderr if a run longer than a trial trains on random tokens."""
    steps = getattr(getattr(recipe, "trainer", None), "max_steps", None) or 0
    if is_mock(getattr(recipe, "data", None)) and (steps > _TRIAL_STEPS or steps < 0):
        print(
            f"note: {f'{steps:,}' if steps > 0 else 'all'} steps on random tokens (MockDataModule), from which the "
            f"model can learn nothing. To train on text, {own_data()}.",
            file=sys.stderr,
        )


def place_of(executor: Any, gpu: str | None) -> tuple[Any, ClusterSettings | None, Machine]:
    """The executor of a name with its settings, and the machine that its ranks run on. ``gpu`` is the kind of GPUs; None:
    the profile's.

    Raises:
        ConfigError: an unknown name, a wrong profile, or an unknown kind of GPUs.
    """
    executor, settings = resolve_executor(executor)
    local = executor in (None, "local") or isinstance(executor, nemo_run.LocalExecutor)
    return executor, settings, machine_of(executor, gpu or (settings.gpu if settings else "") or None, local=local)


def machine_of(executor: Any, gpu: str | None, *, local: bool) -> Machine:
    """The machine of an executor: this machine, or nodes with the executor's number of GPUs, which defaults to 8.

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
    """Write devices, nodes and name into ``recipe`` where they are given. Returns the resulting devices and nodes on
    ``machine``, 1 where nothing sets them.

    "auto" and similar values become numbers, so that all ranks read the same value.

    Raises:
        ConfigError: ``devices`` or ``nodes``, or the trainer's, are not valid numbers.
    """
    require_counts("", others=(None,), devices=devices, nodes=nodes)
    trainer = getattr(recipe, "trainer", None)
    log = getattr(recipe, "log", None)
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
        name or getattr(log, "name", None) or getattr(target, "__name__", "run"),
    )


_RESOURCE = re.compile(r"(?:gres/)?gpu(?::[^:,=]*[^:,=\d][^:,=]*)?(?:[:=](\d+))?\Z")

_SHAPE = re.compile(r"gpu\.(?:(\d+)x)?")
"""The beginning of Lepton's names of shapes, such as gpu.8xh100-sxm and gpu.a10."""


def check_gpus(executor: Any, recipe: Any, *, devices: int, nodes: int) -> None:
    """Refuse an executor that requests fewer GPUs per node than there are ranks. Report one that requests more, or none.
    `nemo2.launch.executor_ranks` sets the number on the executors whose ranks are counted in GPUs.

    Raises:
        ConfigError: there are more ranks than GPUs.
    """
    for request, gpus in _requests(executor, devices=devices):
        if gpus < devices:
            splits = gpus and not devices % gpus and type(executor).__name__ != "DockerExecutor"  # which has one node
            fit = f"{nodes * devices // gpus} nodes of {gpus}, or " if splits else ""
            raise ConfigError(
                f"trainer.devices={devices}: the executor requests only {counted(gpus, 'GPU')} per node ({request}), but "
                f"each rank needs one. Use {fit}nodes of at most {gpus} ({advice('--devices', 'devices')}={gpus}), or "
                f"correct {request.partition('=')[0]}."
            )
        if gpus > devices:
            print_warning(
                f"{request} requests {gpus} GPUs per node, of which the run uses {devices} (trainer.devices)."
            )
    field = _without_gpus(executor)
    if field and getattr(getattr(recipe, "trainer", None), "accelerator", None) != "cpu":
        kind, value = type(executor).__name__, getattr(executor, field)
        print_warning(f"{kind}.{field}={value!r} requests no GPU, so the ranks train on CPUs or fail. Set {field}.")


def _requests(executor: Any, *, devices: int) -> Iterator[tuple[str, int]]:
    """The settings that request GPUs, and the number on each node."""
    kind = type(executor).__name__
    if kind == "DockerExecutor" and (executor.num_gpus or 0) > 0:  # -1: all
        yield f"num_gpus={executor.num_gpus}", executor.num_gpus
    if kind == "LeptonExecutor" and (match := _SHAPE.match(executor.resource_shape)):
        yield f"resource_shape={executor.resource_shape}", int(match[1] or 1)
    if kind != "SlurmExecutor":
        return
    if gpus := executor.gpus_per_node:
        yield f"gpus_per_node={gpus}", gpus
    if resources := [match for word in (executor.gres or "").split(",") if (match := _RESOURCE.match(word.strip()))]:
        yield f"gres={executor.gres}", sum(int(match[1] or 1) for match in resources)
    if gpus := executor.gpus_per_task:
        by_srun = type(launcher_of(executor)) is Launcher
        yield f"gpus_per_task={gpus}{'' if by_srun else ' of one torchrun'}", gpus * (devices if by_srun else 1)


def _without_gpus(executor: Any) -> str:
    """The field by which this executor would request GPUs, if it requests none. "": it may request some."""
    kind = type(executor).__name__
    if kind == "DockerExecutor":
        other = executor.runtime or "device_requests" in executor.additional_kwargs
        return "" if executor.num_gpus or other else "num_gpus"
    if kind.startswith("Skypilot"):
        return "" if executor.gpus or executor.instance_type else "gpus"
    if kind == "DGXCloudExecutor":
        return "" if executor.gpus_per_node or "compute" in executor.custom_spec else "gpus_per_node"
    if kind == "LeptonExecutor":
        return "resource_shape" if executor.resource_shape.startswith("cpu.") else ""
    if kind == "SlurmExecutor":  # a partition may have GPUs without a request
        return "gpus_per_node" if executor.gpus_per_node == 0 and not list(_requests(executor, devices=1)) else ""
    return ""


def on_slurm(request: LaunchRequest, settings: ClusterSettings) -> RunResult:
    """Submit a recipe as a job and follow it, or print the job with the reasons of its settings. Ctrl-C leaves the job to
    Slurm."""
    job, secrets = prepare(request, settings)
    if request.dryrun:
        print(job_script(job), end="")
        notes = [*request.reasons, *(f"{key}: in a file of mode 0600" for key in sorted(secrets))]
        if notes:
            print("\n".join(["", "# because", *(f"#   {line}" for line in notes)]))
        return request.result("dryrun")
    started = time.monotonic()
    submission = submit(job, request, settings, secrets=secrets)
    facts: dict[str, Any] = {"log_dir": Path(submission.folder), "jobs": tuple(submission.jobs)}
    print(f"submitted as job {' '.join(submission.jobs)}; its folder: {submission.folder}", flush=True)
    if request.detach:
        return request.result("submitted", **facts)
    shell = shell_of(request.executor.tunnel)
    try:
        ending = follow(submission, shell)
    except KeyboardInterrupt:
        print(f"\nThe run continues. `scancel {' '.join(submission.jobs)}` saves and ends it.", file=sys.stderr)
        raise
    directory = run_directory(shell, submission.folder)
    facts |= {"run_dir": Path(directory) if directory else None, "seconds": time.monotonic() - started}
    if ending.state == "done":
        return request.result("succeeded", **facts)
    if ending.state == CONTINUED:
        print(ending.message, flush=True)
        return request.result("continued", EXIT_PREEMPTED, **facts)
    message = f"{ending.message.rstrip('.')}. Logs of all ranks: {submission.folder}/lives"
    failure = RankFailure(message, rank=ending.rank, exit_code=1, details="", log_dir=Path(submission.folder))
    status: Status = "cancelled" if ending.state == "cancelled" else "failed"
    return request.result(status, 1, failure=failure, **facts)
