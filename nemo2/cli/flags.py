# SPDX-License-Identifier: Apache-2.0
"""Options with the same meaning in every command, and their effect on a recipe."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from nemo2.base.counts import counted
from nemo2.base.errors import ConfigError
from nemo2.base.files import output_file, output_folder
from nemo2.base.gpus import gpu
from nemo2.cli.adapter import AT_LEAST_1
from nemo2.cli.own_data import Data
from nemo2.cli.sources import configured
from nemo2.mcore.settle.machine import Machine

_UNITS = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


# Parsed from the text: typer's own path loses the slash of a folder.
Output = Annotated[Optional[Path], typer.Option("--output", "-o", parser=output_file)]
FileOrFolder = Annotated[Optional[Path], typer.Option("--output", "-o")]
Prefix = Annotated[Path, typer.Option("--output", "-o", parser=output_file)]
Html = Annotated[Optional[Path], typer.Option("--html", parser=output_file)]
Folder = Annotated[Path, typer.Option("--output", "-o", callback=output_folder, help="Directory to write.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing directory.")]
OverwriteFile = Annotated[bool, typer.Option("--overwrite", help="Replace an existing file of --output.")]
Performance = Annotated[bool, typer.Option("--performance", help="Use the recipe's performance mode.")]


@dataclass(frozen=True)
class MachineOptions:
    """The machines of a run. The fields are options of the command.

    Args:
        gpus: GPU type, number of GPUs, or both: H100, 64, H100x64 or 64xH100. A number sets nodes and devices; nodes have
            8 GPUs unless the trainer sets another number.
        nodes: Number of nodes; sets trainer.num_nodes.
        devices: GPUs (or CPU processes) per node; sets trainer.devices.
    """

    gpus: Annotated[Optional[str], typer.Option("--gpus", "--gpu")] = None
    nodes: Annotated[Optional[int], AT_LEAST_1] = None
    devices: Annotated[Optional[int], AT_LEAST_1] = None

    def __post_init__(self) -> None:
        if self.gpus is not None:
            machine_of(self.gpus)  # refused before the recipe is built, which takes seconds


@dataclass(frozen=True)
class RecipeOptions(MachineOptions):
    """How a command takes its recipe. The fields are options of the command."""

    performance: Performance = False
    data: Data = None


UNCHANGED = RecipeOptions()
"""With the recipe's own nodes, devices, mode and data."""


def number_of(text: str, *, option: str, forms: str) -> float:
    """The number of ``7B``, ``350M`` or ``7e9``.

    Args:
        text: What was typed.
        option: The option, for the error.
        forms: What the option takes, for the error: "a number of tokens, such as 1T".

    Raises:
        ConfigError: the text has none of these forms.
    """
    number, unit = text.strip().lower(), 1.0
    if number and number[-1] in _UNITS:
        number, unit = number[:-1], _UNITS[number[-1]]
    try:
        value = float(number) * unit
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"{option} {text}: must be {forms}.")
    return value


def recipe_on(name: str, overrides: Optional[Sequence[str]], *, options: RecipeOptions) -> Any:
    """The recipe with its overrides, on the nodes and devices that the options name.

    Raises:
        ConfigError: see `nemo2.cli.sources.configured` and `on_machine`.
    """
    recipe = configured(name, list(overrides or []), performance=options.performance, data=options.data)
    return on_machine(recipe, options=options)


def on_machine(recipe: Any, *, options: MachineOptions, gpus_per_node: Optional[int] = None) -> Any:
    """The recipe on the nodes and devices that the options name. Without such options: the same object.

    ``gpus_per_node`` is that of the cluster. None: it isn't known.

    Raises:
        ConfigError: see `machine_of`; or two options, or an option and an override, name different numbers; or the GPUs
            don't fill whole nodes.
    """
    trainer = getattr(recipe, "trainer", None)
    for option, field, value in (("--nodes", "num_nodes", options.nodes), ("--devices", "devices", options.devices)):
        if value is not None:
            set_option(trainer, field, value, option=option, path=f"trainer.{field}")
    machine = machine_of(options.gpus)
    if machine.count is None or trainer is None:
        return recipe
    from nemo2.config.located import recorded_at
    from nemo2.mcore.settle.world import devices_of, on

    count, option = machine.count, f"--gpus {options.gpus}"
    chosen = set_on_command_line(trainer, "devices")
    if gpus_per_node is not None:
        machine = replace(machine, per_node=gpus_per_node)
        if not chosen:
            trainer.devices = min(devices_of(trainer.devices, machine), gpus_per_node)
    if set_on_command_line(trainer, "num_nodes"):
        num_nodes = trainer.num_nodes
        per_node = devices_of(trainer.devices, machine) if chosen else count // num_nodes
        if num_nodes * per_node != count:
            raise ConfigError(
                f"{option}: {count} GPUs aren't {num_nodes} nodes of {max(per_node, 1)} (trainer.num_nodes, trainer.devices): "
                "leave one of them out."
            )
        if trainer.devices != per_node:
            set_option(trainer, "devices", per_node, option=option, path="trainer.devices")
    elif chosen and count % (per_node := devices_of(trainer.devices, machine)):
        raise ConfigError(
            f"{option}: {count} GPUs can't be split into nodes of {per_node} (trainer.devices): leave one of them out."
        )
    with recorded_at(option, 1):
        return on(recipe, machine)


def set_option(node: Any, field: str, value: Any, *, option: str, path: str) -> None:
    """Set a field to the value of an option.

    Raises:
        ConfigError: an override on the same command line sets another value.
    """
    from nemo2.config.located import recorded_at

    if set_on_command_line(node, field) and (now := getattr(node, field)) != value:
        raise ConfigError(f"{option} {value} contradicts {path}={now}: leave one of them out.")
    with recorded_at(f"{option} {value}", 1):
        setattr(node, field, value)


def set_on_command_line(node: Any, field: str) -> bool:
    """Whether the command line sets this field, by an override or by an option."""
    from nemo2.config.overrides import COMMAND_LINE
    from nemo2.config.walk import who_set

    entries = who_set(node, field)
    return bool(entries) and (entries[-1][0] == COMMAND_LINE or entries[-1][0].startswith("--"))


def machine_of(gpus: Optional[str]) -> Machine:
    """The machine that ``--gpus`` names; without a kind, GPUs of any kind.

    Raises:
        ConfigError: an unknown GPU, or an invalid number.
    """

    if gpus is None:
        return Machine()
    return Machine(count=int(gpus)) if _is_number(gpus) else Machine.named(gpus)


def kind_of(gpus: Optional[str]) -> Optional[str]:
    """The kind of GPU that ``--gpus`` names. None: it names none."""
    return None if gpus is None or _is_number(gpus) else gpu(gpus).name


def machine_line(recipe: Any, machine: Machine) -> str:
    """The line that names the machine of an answer. "": the recipe has no trainer."""
    from nemo2.mcore.settle.world import world_of

    if getattr(recipe, "trainer", None) is None:
        return ""

    world = world_of(recipe, machine)
    return f"for {counted(world.nodes, 'node')} x {machine.counted(world.devices)}"


def _is_number(gpus: str) -> bool:
    return gpus.strip().isdigit() and int(gpus) > 0
