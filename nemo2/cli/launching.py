# SPDX-License-Identifier: Apache-2.0
"""The options of commands that start a run, and the start itself."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from nemo2.base.errors import ConfigError
from nemo2.cli.adapter import AT_LEAST_1
from nemo2.cli.flags import MachineOptions, kind_of, on_machine, set_option
from nemo2.cli.sources import changed
from nemo2.cli.trackers import add_trackers, tracker_called, variables_for
from nemo2.launch.clusters import resolve_executor
from nemo2.mcore.settle.machine import Machine


@dataclass(frozen=True)
class LaunchOptions(MachineOptions):
    """Where and how a run starts. The fields are options of the command.

    Args:
        executor: Where to run: 'local', or a cluster profile (`nemo2 cluster list`).
        run_name: Name of the run; sets log.name.
        directory: Directory for all runs; sets log.log_dir.
        dryrun: Run all checks and print the launch, but start nothing.
        detach: Return after submitting, if the executor supports it.
        plugins: Add a plugin, such as 'NsysPlugin(start_step=5,end_step=8)'. Takes several; may be repeated.
        force: Start the run although its predicted memory exceeds the GPUs.
        yes: Submit to a cluster without asking.
    """

    executor: str = "local"
    run_name: Annotated[Optional[str], typer.Option("--name")] = None
    directory: Annotated[Optional[Path], typer.Option("--dir")] = None
    dryrun: Annotated[bool, typer.Option("--dryrun", "-n")] = False
    detach: bool = False
    plugins: Optional[list[str]] = None
    force: bool = False
    yes: Annotated[bool, typer.Option("--yes", "-y")] = False


@dataclass(frozen=True)
class TrainingOptions(LaunchOptions):
    """Options of a run that saves checkpoints and can resume from them.

    Args:
        chain: Slurm only: number of jobs that run one after another and continue the same run.
        accept_changes: Resume although the recipe no longer matches the checkpoint; sets resume.accept_changes.
        trackers: Also log to tensorboard, wandb, mlflow or comet. NAME:offline keeps its files on this machine. May be
            repeated.
    """

    chain: Annotated[int, AT_LEAST_1] = 1
    accept_changes: bool = False
    trackers: Annotated[Optional[list[str]], typer.Option("--tracker")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for word in self.trackers or []:
            tracker_called(word)


LAUNCHING, TRAINING = LaunchOptions(), TrainingOptions()
"""On this machine, with the recipe's own settings."""


def changes_of(
    overrides: Optional[list[str]], data: Optional[str], performance: bool, source: Optional[str] = None
) -> list[str]:
    """The words of the command line that change the recipe, for the block at the start."""
    named = [word for option, value in (("--data", data), ("--from", source)) if value for word in (option, value)]
    return [*(overrides or []), *named, *["--performance"] * performance]


def logged(
    source: Callable[[], Any],
    overrides: list[str],
    *,
    own_name: Callable[[Any], Optional[str]],
    options: LaunchOptions,
    data: Optional[str] = None,
) -> Any:
    """The recipe that ``source`` stands for, with its overrides. The run's name is ``own_name`` of the recipe
    unless an override or ``--name`` sets another.

    Raises:
        ConfigError: an override and an option set different names or directories of the run.
    """
    resolve_executor(options.executor)  # building the recipe takes seconds, which an unknown name doesn't wait for
    trackers = options.trackers or [] if isinstance(options, TrainingOptions) else []

    def make() -> Any:
        recipe = source()
        if (name := own_name(recipe)) != recipe.log.name:
            recipe.log.name = name
        # Before the overrides, so that an override can set fields of the tracker.
        add_trackers(recipe, trackers)
        return recipe

    recipe = changed(make, overrides, data=data)
    for option, field, requested in (
        ("--name", "name", options.run_name),
        ("--dir", "log_dir", None if options.directory is None else str(options.directory)),
    ):
        if requested is not None:
            set_option(recipe.log, field, requested, option=option, path=f"log.{field}")
    if isinstance(options, TrainingOptions) and options.accept_changes:
        recipe.resume.accept_changes = True
    return recipe


def launched(recipe: Any, *, name: str, changes: list[str], options: LaunchOptions) -> None:
    """Start ``recipe`` as the options say, and print the outcome. ``changes``: printed in the block at the start.

    Raises:
        ConfigError: options contradict each other, or the launch refuses the recipe.
    """
    from nemo2.launch import launch
    from nemo2.launch.announce import print_end, print_start
    from nemo2.launch.launcher import place_of
    from nemo2.launch.plugins.apply import split_plugins

    executor, kind = options.executor, kind_of(options.gpus)
    where, profile, machine = place_of(executor, kind)
    gpus_per_node = getattr(where, "gpus_per_node", None)
    recipe = on_machine(recipe, options=options, gpus_per_node=gpus_per_node)
    if kind is not None:
        _refuse_other_gpus(kind, executor, machine, dryrun=options.dryrun, profile=profile.gpu if profile else "")
    print_start(recipe, name, executor, machine, profile, changes=changes)
    if executor != "local" and not (options.yes or options.dryrun) and sys.stdin.isatty():
        typer.confirm(f"Submit to {executor!r}?", abort=True)
    trackers = options.trackers or [] if isinstance(options, TrainingOptions) else []
    result = launch(
        recipe,
        executor,
        env=variables_for(trackers) if executor != "local" else None,
        devices=options.devices,
        nodes=options.nodes,
        gpu=kind,
        dryrun=options.dryrun,
        detach=options.detach,
        chain=options.chain if isinstance(options, TrainingOptions) else 1,
        plugins=split_plugins(options.plugins or []),
        force=options.force,
        quiet=True,
    )
    if result.status == "continued":
        raise typer.Exit(result.exit_code)
    print_end(result)


def _refuse_other_gpus(kind: str, executor: str, machine: Machine, *, dryrun: bool, profile: str) -> None:
    """Raise ConfigError if a run names GPUs that its machine lacks: other GPUs than the cluster's ``profile`` names, or
    GPUs that this machine doesn't have. A dry run on this machine may name any."""
    if profile and Machine.named(profile).gpu != Machine.named(kind).gpu:
        raise ConfigError(
            f"--gpus {kind}: the nodes of {executor!r} have {profile} GPUs (gpu in its profile). Name these GPUs, give "
            "only a number, or correct the profile."
        )
    if executor != "local" or dryrun or not machine.lacks_its_gpus:
        return
    raise ConfigError(
        f"--gpus {kind}: the run would start on {Machine.here().describe()}. Use --devices instead of --gpus, name a cluster "
        "with --executor, or add --dryrun."
    )
