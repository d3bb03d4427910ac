# SPDX-License-Identifier: Apache-2.0
"""Finds all broken rules of a recipe before anything runs."""

import os
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, Optional

from nemo2.base.counts import counted
from nemo2.base.errors import ConfigError, Nemo2Error
from nemo2.config.tree import Partial, described_now
from nemo2.mcore.parallel.layout import Layout
from nemo2.mcore.settle.machine import Machine
from nemo2.preflight.checks.facts import Facts, read_facts
from nemo2.preflight.checks.rule import Problem
from nemo2.preflight.checks.rules.launching import too_many_for_this_machine
from nemo2.preflight.checks.rules.types import TYPES
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


def check_parts(entry_point: Callable[..., Any], parts: Mapping[str, Any]) -> None:
    """Reject built parts of a run that break a rule. `nemo2.llm.train` calls it on every rank, so that the rules hold on
    every way into a run. Rules that open files of this machine are left out: the run opens these files itself.

    Args:
        entry_point: The function that takes the parts.
        parts: Its arguments. Objects that don't tell their arguments, of classes of the user's own, are read as they are.

    Raises:
        ConfigError: with all broken rules, one paragraph each.
    """
    recipe = Partial(entry_point, **{name: described_now(part) for name, part in parts.items()})
    machine = replace(Machine.here(), local=False)
    where: dict[str, Any] = {"machine": machine, "environment": os.environ}
    if not (problems := _of_types(recipe)):
        problems = apply_rules(read_facts(recipe, **where))
        problems += _of_a_teacher(recipe, {problem.message for problem in problems}, where)
    if problems:
        raise ConfigError("\n".join(problem.message for problem in problems), rule=problems[0].rule)


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

    problems = [
        Problem(rule="travels-as-text", topic="The recipe", message=message) for message in unserialisable(recipe)
    ]
    if getattr(recipe, "trainer", None) is None:
        return problems
    if mistyped := _of_types(recipe):
        return problems + mistyped
    if local:
        named = getattr(recipe.trainer, "devices", None)
        indices = named if isinstance(named, list | tuple) else ()
        problems += [
            Problem(rule="fits-this-machine", topic="The launch", message=message)
            for message in too_many_for_this_machine(devices, nodes, chosen=chosen, indices=indices)
        ]
    if local and machine is None:
        machine = Machine.here()
    if local and environment is None:
        environment = os.environ
    facts = read_facts(recipe, devices=devices, nodes=nodes, machine=machine, environment=environment)
    problems += apply_rules(facts)
    if local and not problems:
        from nemo2.preflight.checks.earlier import changes_that_do_not_fit

        problems += [
            Problem(rule="recipe-fits-its-earlier-run", topic="Files of this machine", message=message)
            for message in changes_that_do_not_fit(facts)
        ]
    where = {"devices": devices, "nodes": nodes, "machine": machine, "environment": environment}
    return problems + _of_a_teacher(recipe, {problem.message for problem in problems}, where)


def check_types(recipe: Any) -> None:
    """Check only that each value has the type of its parameter. Code that reads a recipe before `check_recipe` needs it.

    Raises:
        ConfigError: with all values of a wrong type, one paragraph each.
    """
    if mistyped := _of_types(recipe):
        raise ConfigError("\n".join(problem.message for problem in mistyped))


def _of_types(recipe: Any) -> list[Problem]:
    # The settings may have any type, and these rules read the recipe only.
    unread = Facts(recipe=recipe, layout=Layout(), sizes={}, nodes=1, devices=None, world_size=1)
    return apply_rules(unread, TYPES.rules)


def _of_a_teacher(recipe: Any, reported: Collection[str], where: Mapping[str, Any]) -> list[Problem]:
    """The problems of a distillation's teacher in the recipe's layout, without those that the student has too."""
    if "nemo2.training.strategies.distillation" not in sys.modules:
        return []  # a recipe with a teacher has the class of its callback
    from nemo2.training.strategies.distillation import no_virtual_stages, teachers_recipe

    topic = "The teacher"
    try:
        alone = teachers_recipe(recipe)
    except Nemo2Error as error:
        return [Problem(rule="teacher-is-there", topic=topic, message=str(error))]
    if alone is None:
        return []
    vp: int = getattr(recipe.trainer.strategy, "virtual_pipeline_model_parallel_size", None) or 1
    stages = [Problem(rule="teacher-has-one-stage", topic=topic, message=no_virtual_stages(vp))] if vp > 1 else []
    problems = apply_rules(read_facts(alone, **where))
    return stages + [
        replace(one, topic=topic, message=f"The teacher: {one.message}")
        for one in problems
        if one.message not in reported
    ]
