# SPDX-License-Identifier: Apache-2.0
"""Checks the built parts of a run on its ranks, and what a check before the run has in common with that."""

import os
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from nemo2.base.errors import ConfigError, Nemo2Error
from nemo2.config.tree import Partial, described_now
from nemo2.mcore.parallel.layout import Layout
from nemo2.mcore.settle.machine import Machine
from nemo2.preflight.checks.facts import Facts, read_facts
from nemo2.preflight.checks.rule import Problem
from nemo2.preflight.checks.rules.types import TYPES
from nemo2.preflight.checks.table import apply_rules


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
    if not (problems := mistyped_values(recipe)):
        problems = apply_rules(read_facts(recipe, **where))
        problems += problems_of_a_teacher(recipe, {problem.message for problem in problems}, where)
    if problems:
        raise ConfigError("\n".join(problem.message for problem in problems), rule=problems[0].rule)


def mistyped_values(recipe: Any) -> list[Problem]:
    """The values of a recipe whose type isn't that of their parameter."""
    # The settings may have any type, and these rules read the recipe only.
    unread = Facts(recipe=recipe, layout=Layout(), sizes={}, nodes=1, devices=None, world_size=1)
    return apply_rules(unread, TYPES.rules)


def problems_of_a_teacher(recipe: Any, reported: Collection[str], where: Mapping[str, Any]) -> list[Problem]:
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
        replace(problem, topic=topic, message=f"The teacher: {problem.message}")
        for problem in problems
        if problem.message not in reported
    ]
