# SPDX-License-Identifier: Apache-2.0
"""`launch` and `run`: a recipe on an executor, followed to its end, with the failure of any rank raised here."""

import copy
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import nemo_run

from nemo2.errors import ConfigError, RuntimeFault
from nemo2.launch.clusters import named
from nemo2.launch.environment import set_variables
from nemo2.launch.experiment import on_experiment
from nemo2.launch.finished import refuse_finished_run
from nemo2.launch.plugins import Plugins, apply, made
from nemo2.launch.result import RunResult
from nemo2.launch.shape import give_shape
from nemo2.launch.slurm.run import on_slurm
from nemo2.launch.slurm.start import ClusterSettings
from nemo2.names import safe_name
from nemo2.run_dir.faults import FAULT_DIR_VARIABLE
from nemo2.settle.machine import Machine
from nemo2.settle.world import World, world_of

_TRIAL = 50
"""Steps of a run that is only to be looked at."""


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
        if local:
            refuse_finished_run(recipe)
    _say_random_data(recipe)
    given: dict[str, Any] = {"name": title, "experiment_id": experiment_id, "env": env or {}}
    given |= {"dryrun": dryrun, "detach": detach}
    shape: Any = {"devices": devices, "nodes": nodes}
    if isinstance(executor, nemo_run.SlurmExecutor):
        executor = executor.clone()
        reasons, warned = set_variables(executor, recipe, machine, **shape)
        told = ([*edited, *reasons], warned)
        result = on_slurm(recipe, executor, settings or ClusterSettings(), **given, **shape, chain=chain, reasons=told)
    elif type(executor).__name__ == "KubeflowExecutor":  # whose class asks for a package that few have
        from nemo2.launch.kubeflow.run import on_kubeflow

        pods: Any = executor
        pods = pods.clone()
        give_shape(pods, **shape)
        reasons, warned = set_variables(pods, recipe, machine, **shape)
        result = on_kubeflow(recipe, pods, **given, reasons=([*edited, *reasons], warned))
    else:
        result = on_experiment(recipe, executor, **given, **shape, machine=machine, local=local, edited=edited)
    if result.failure is not None and raise_on_failure:
        raise result.failure
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


def _say_random_data(recipe: Any) -> None:
    """Say on stderr that a run of more than a trial's steps trains on random tokens."""
    from nemo2.data.mock import MockDataModule

    steps = _get(_get(recipe, "trainer"), "max_steps") or 0
    if getattr(_get(recipe, "data"), "__fn_or_cls__", None) is MockDataModule and (steps > _TRIAL or steps < 0):
        print(
            f"note: {f'{steps:,}' if steps > 0 else 'all'} steps on random tokens (MockDataModule), in which there is nothing to "
            "learn; --data PATH, or data=PreTrainingDataModule data.paths=PATH, trains on text.",
            file=sys.stderr,
        )


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


def _get(node: Any, name: str) -> Any:
    """A field of a config, None where it is missing or unset."""
    if node is None:
        return None
    try:
        return getattr(node, name)
    except (AttributeError, ValueError):
        return None
