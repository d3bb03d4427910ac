# SPDX-License-Identifier: Apache-2.0
"""Finds all broken rules of a recipe before anything runs."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Optional

from nemo2.base.advice import advice
from nemo2.base.counts import counted
from nemo2.base.errors import ConfigError
from nemo2.base.place import usable_cores
from nemo2.mcore.settle.machine import Machine
from nemo2.preflight.checks.facts import read_facts
from nemo2.preflight.checks.parts import mistyped_values, problems_of_a_teacher
from nemo2.preflight.checks.rule import Problem
from nemo2.preflight.checks.table import apply_rules, is_of_the_layout


def check_recipe(
    recipe: Any,
    *,
    devices: Optional[int] = None,
    nodes: Optional[int] = None,
    local: bool = False,
    chosen: bool = True,
    machine: Optional[Machine] = None,
    environment: Optional[Mapping[str, str]] = None,
) -> None:
    """Reject a recipe that can't run, before it is launched.

    Args:
        recipe: A configured call of ``llm.pretrain`` or a similar function.
        devices: Processes per node that will be launched. None: the trainer's.
        nodes: Nodes that will be launched. None: the trainer's.
        local: The recipe will run on this machine, so its files, devices, packages and variables are checked too.
        chosen: The user asked for ``devices`` on this machine. False: they are the recipe's, which was laid out for
            another machine.
        machine: The machine of the run. None: this machine with ``local``, otherwise GPUs of any kind.
        environment: The variables of its processes. None: this process's with ``local``, otherwise unknown.

    Raises:
        ConfigError: with all broken rules, one paragraph each, and the nearest legal layouts if another layout would
            fix them.
    """
    problems = find(
        recipe, devices=devices, nodes=nodes, local=local, chosen=chosen, machine=machine, environment=environment
    )
    if problems:
        messages = [problem.message for problem in problems]
        if any(map(is_of_the_layout, problems)):
            from nemo2.preflight.checks.nearest import nearest_layouts

            facts = read_facts(recipe, devices=devices, nodes=nodes, machine=machine)
            layouts = [
                f"{layout.describe(facts.world_size)} ({' '.join(changes)})"
                for layout, changes in nearest_layouts(facts)
            ]
            if layouts:
                messages.append(
                    f"The nearest legal layouts on {counted(facts.world_size, 'GPU')}: {'; '.join(layouts)}."
                )
        raise ConfigError("\n".join(messages))


def find_problems(recipe: Any, **where: Any) -> list[str]:
    """All broken rules as sentences. Empty: no rule is broken. The arguments are those of `check_recipe`."""
    return [problem.message for problem in find(recipe, **where)]


def find(
    recipe: Any,
    *,
    devices: Optional[int] = None,
    nodes: Optional[int] = None,
    local: bool = False,
    chosen: bool = True,
    machine: Optional[Machine] = None,
    environment: Optional[Mapping[str, str]] = None,
) -> list[Problem]:
    """All broken rules. Empty: no rule is broken. The arguments are those of `check_recipe`.

    If values have a wrong type, only these are listed, because the other rules can't read them.
    """
    from nemo2.config.serialize import problems as unserialisable

    problems = _problems("travels-as-text", "The recipe", unserialisable(recipe))
    if getattr(recipe, "trainer", None) is None:
        return problems
    if mistyped := mistyped_values(recipe):
        return problems + mistyped
    if local:
        named = getattr(recipe.trainer, "devices", None)
        indices = named if isinstance(named, list | tuple) else ()
        messages = too_many_for_this_machine(devices, nodes, chosen=chosen, indices=indices)
        problems += _problems("fits-this-machine", "The launch", messages)
    if local and machine is None:
        machine = Machine.here()
    if local and environment is None:
        environment = os.environ
    facts = read_facts(recipe, devices=devices, nodes=nodes, machine=machine, environment=environment)
    problems += apply_rules(facts)
    if local and not problems:
        from nemo2.preflight.checks.earlier import changes_that_do_not_fit

        problems += _problems("recipe-fits-its-earlier-run", "Files of this machine", changes_that_do_not_fit(facts))
    where = {"devices": devices, "nodes": nodes, "machine": machine, "environment": environment}
    return problems + problems_of_a_teacher(recipe, {problem.message for problem in problems}, where)


def _problems(rule: str, topic: str, messages: Iterable[str]) -> list[Problem]:
    return [Problem(rule=rule, topic=topic, message=message) for message in messages]


def check_types(recipe: Any) -> None:
    """Check only that each value has the type of its parameter. Code that reads a recipe before `check_recipe` needs it.

    Raises:
        ConfigError: with all values of a wrong type, one paragraph each.
    """
    if mistyped := mistyped_values(recipe):
        raise ConfigError("\n".join(problem.message for problem in mistyped))


def too_many_for_this_machine(
    devices: Optional[int], nodes: Optional[int], *, chosen: bool, indices: Sequence[int] = ()
) -> Iterator[str]:
    """Messages for a launch here of several nodes, of more ranks than this machine has GPUs, on GPUs by ``indices`` that it
    doesn't have, or, where it has none, of a recipe with more ranks than cores, unless the user has ``chosen`` the number."""
    import torch

    from nemo2.training.trainer import missing_gpus

    cores = max(1, int(usable_cores()))
    if devices is not None and devices > cores and not chosen and not torch.cuda.is_available():
        few = min(2, cores)
        yield (
            f"trainer.devices={devices}: this recipe needs {devices * (nodes or 1)} GPUs, but this machine has no GPU and "
            f"{counted(cores, 'CPU core')}. Run it on a machine with GPUs. Without GPUs, "
            "`nemo2 rehearse RECIPE` counts its memory and messages, and a small recipe trains on CPU "
            f"processes: {advice(f'`nemo2 pretrain llama_tiny --devices {few}`', f'llama_tiny, launch(recipe, devices={few})')}."
        )
        return
    if nodes is not None and nodes > 1:
        here = advice("--nodes 1 --devices N without --gpus", "launch(recipe, nodes=1, devices=N)")
        cluster = advice("--executor NAME", "launch(recipe, NAME)")
        yield (
            f"trainer.num_nodes={nodes}: a launch on this machine starts the ranks of one node, {devices} of these "
            f"(trainer.devices). For N ranks here, use {here}; for several nodes, a cluster ({cluster})."
        )
    if missing := missing_gpus(indices or devices or 0):
        yield missing
