# SPDX-License-Identifier: Apache-2.0
"""`launch` and `run`: run a recipe on an executor, follow it to its end, and raise an exception if any rank fails."""

import copy
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import nemo_run

from nemo2.base.advice import advice, own_data, print_warning
from nemo2.base.counts import require_counts
from nemo2.base.errors import CannotBuild, ConfigError, RuntimeFault
from nemo2.base.names import safe_name
from nemo2.checkpoint.auto_resume import refuse_unresumable
from nemo2.data.mock import is_mock
from nemo2.launch.announce import print_end, print_start
from nemo2.launch.clusters import resolve_executor
from nemo2.launch.environment import known_variables, set_variables
from nemo2.launch.executor_fields import check_fields, start_with_torchrun, text_variables, warn_of_unused_fields
from nemo2.launch.executor_ranks import refuse_other_ranks, set_ranks
from nemo2.launch.experiment import on_experiment
from nemo2.launch.gpu_requests import check_gpus
from nemo2.launch.plugins.apply import Plugins, apply_plugins, build_plugins
from nemo2.launch.request import LaunchRequest
from nemo2.launch.result import RunResult
from nemo2.launch.slurm.run import on_slurm
from nemo2.launch.slurm.settings import ClusterSettings
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
