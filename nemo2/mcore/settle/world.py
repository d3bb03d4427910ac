# SPDX-License-Identifier: Apache-2.0
"""Determines the number of processes of a run from every value of ``trainer.devices`` that Lightning accepts."""

import copy
from dataclasses import dataclass
from typing import Any, Optional

from nemo2.base.advice import advice
from nemo2.base.errors import ConfigError
from nemo2.mcore.settle.machine import Machine

MOST_DEVICES, MOST_NODES = 1024, 131_072
"""Upper limits for devices per node and for nodes. A larger number is a typing error, and enumerating its layouts
would not end."""


@dataclass(frozen=True)
class World:
    """Nodes times devices."""

    nodes: int
    """Machines."""
    devices: int
    """Processes per node, one per GPU."""

    @property
    def size(self) -> int:
        return self.nodes * self.devices


def world_of(recipe: Any, machine: Machine) -> World:
    """The world of a recipe with a trainer, or of a trainer, on ``machine``.

    ``"auto"`` and -1 mean all devices of a node. A machine with a fixed number of GPUs has nodes of the size that the
    trainer asks for, if that size divides the number, and otherwise nodes of 8.

    Args:
        recipe: A recipe with a trainer, or a trainer.
        machine: The machine of the run.

    Raises:
        ConfigError: `devices_problem`, `nodes_problem`, or a number of GPUs that is no whole number of nodes.
    """
    trainer = getattr(recipe, "trainer", recipe)
    devices, nodes = getattr(trainer, "devices", "auto"), getattr(trainer, "num_nodes", 1)
    if problem := nodes_problem(nodes):
        raise ConfigError(problem)
    requested = devices_of(devices, machine)
    if machine.count is None:
        return World(nodes or 1, requested)
    per_node = requested if machine.count % requested == 0 else min(machine.count, machine.per_node)
    if machine.count % per_node:
        raise ConfigError(
            f"{advice('--gpus', 'Machine.count')}: {machine.count} GPUs are not whole nodes of "
            f"{per_node} GPUs. Use a multiple of {per_node}."
        )
    return World(machine.count // per_node, per_node)


def on(recipe: Any, machine: Machine) -> Any:
    """A copy of ``recipe`` whose trainer has the nodes and devices on ``machine`` as numbers.

    Args:
        recipe: A recipe with a trainer.
        machine: The machine of the run.

    Raises:
        ConfigError: as in `world_of`, or the recipe's trainer is none.
    """
    if not hasattr(recipe.trainer, "devices"):
        raise ConfigError(f"trainer={recipe.trainer!r}: must be a Trainer or its configuration.")
    world, recipe = world_of(recipe, machine), copy.deepcopy(recipe)
    trainer = recipe.trainer
    for name, value in (("num_nodes", world.nodes), ("devices", world.devices)):
        if getattr(trainer, name, None) != value:
            setattr(trainer, name, value)
    return recipe


def devices_of(devices: Any, machine: Machine) -> int:
    """The number of devices of a node for a value of ``trainer.devices``.

    Raises:
        ConfigError: `devices_problem`.
    """
    if problem := devices_problem(devices):
        raise ConfigError(problem)
    named = _indices(devices)
    return machine.per_node if named is None else len(named)


def devices_problem(devices: Any) -> Optional[str]:
    """Why ``trainer.devices`` is invalid. None: it is valid.

    None, "auto" and -1 mean all devices of a node; 2 and "2" mean two; [0, 1] and "0,1" mean two by their indices.
    """
    try:
        named = _indices(devices)
    except (TypeError, ValueError):
        named = ()
    if named is None or (0 < len(named) <= MOST_DEVICES and len(set(named)) == len(named) and min(named) >= 0):
        return None
    return (
        f"trainer.devices={devices!r}: must be a number from 1 to {MOST_DEVICES}, a list of different indices such as "
        "[0, 1], or 'auto' or -1 for all devices of a node."
    )


def nodes_problem(nodes: Any) -> Optional[str]:
    """Why ``trainer.num_nodes`` is invalid. None: it is valid, or it is None, which means 1."""
    if nodes is None or (isinstance(nodes, int) and not isinstance(nodes, bool) and 1 <= nodes <= MOST_NODES):
        return None
    return f"trainer.num_nodes={nodes!r}: must be a number from 1 to {MOST_NODES:,}."


def _indices(devices: Any) -> Optional[range | list[int]]:
    """The devices of a node by index. None: all of them.

    Raises:
        TypeError: the value has another form.
        ValueError: the value has another form.
    """
    if isinstance(devices, str):
        text = devices.strip()
        devices = [part for part in text.split(",") if part.strip()] if "," in text else text
        if devices in ("auto", "-1"):
            return None
        if isinstance(devices, str):
            devices = int(devices)
    if devices in (None, -1) and not isinstance(devices, bool):
        return None
    if isinstance(devices, list | tuple):
        if any(isinstance(index, bool) or not isinstance(index, int | str) for index in devices):
            raise TypeError
        return [int(index) for index in devices]
    if isinstance(devices, bool) or not isinstance(devices, int):
        raise TypeError
    return range(min(devices, MOST_DEVICES + 1))
