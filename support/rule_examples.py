# SPDX-License-Identifier: Apache-2.0
"""The recipe of a rule's example (`nemo2.preflight.checks.rule.Case`), and what the rules say of it."""

import contextlib
from collections.abc import Mapping
from functools import reduce
from typing import Any, Optional

from nemo2.base.advice import for_the_command_line
from nemo2.cli.sources import recipe_tree
from nemo2.config import Config, apply_overrides
from nemo2.data.pretraining import PreTrainingDataModule
from nemo2.data.tokenizer import ByteTokenizer
from nemo2.mcore.settle.machine import Machine
from nemo2.preflight.checks.find import find
from nemo2.preflight.checks.rule import Case, Problem


def recipe_of(case: Case) -> Any:
    """The case's recipe with its changes."""
    recipe = recipe_tree(case.recipe)
    if case.changes:
        recipe = apply_overrides(recipe, case.changes) or recipe
    for path, value in case.assigned.items():
        *parents, name = path.split(".")
        setattr(reduce(getattr, parents, recipe), name, value)
    if case.corpus is not None:
        recipe.data = Config(PreTrainingDataModule, tokenizer=Config(ByteTokenizer), **case.corpus)
    return recipe


def problems_of(
    case: Case, recipe: Optional[Any] = None, environment: Optional[Mapping[str, str]] = None
) -> list[Problem]:
    """Problems of a case, in words for who typed it: a command, unless it assigns objects. ``environment`` are variables beside
    its own."""
    python = bool(case.assigned or case.corpus)
    with contextlib.nullcontext() if python else for_the_command_line(["check"]):
        return find(
            recipe if recipe is not None else recipe_of(case),
            devices=case.devices,
            local=case.here,
            machine=None if case.gpu is None else Machine.named(case.gpu),
            environment={**(environment or {}), **case.environment},
        )
