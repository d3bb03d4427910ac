# SPDX-License-Identifier: Apache-2.0
"""A case is a recipe with changes, on a machine: its recipe, the command that checks it, and what the rules say of it."""

import contextlib
import copy
import functools
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Optional

from nemo2.base.advice import for_the_command_line
from nemo2.cli.sources import recipe_tree
from nemo2.config import Config, apply_overrides
from nemo2.data.pretraining import PreTrainingDataModule
from nemo2.data.tokenizer import ByteTokenizer
from nemo2.mcore.settle.machine import Machine
from nemo2.preflight.checks.find import find
from nemo2.preflight.checks.rule import Problem


@dataclass(frozen=True, kw_only=True)
class Case:
    """A recipe with changes, and its machine: the arguments of `nemo2 check`."""

    recipe: str
    changes: tuple[str, ...] = ()
    """Changes in the command line's form: ``trainer.max_steps=100``."""
    assigned: Mapping[str, Any] = field(default_factory=dict)
    """Values by path that the command line would reject because of their type."""
    corpus: Optional[Mapping[str, Any]] = None
    """Arguments of a `PreTrainingDataModule` that replaces the recipe's data. None: the recipe's data."""
    devices: Optional[int] = None
    """Processes per node that the executor starts. None: the trainer's number."""
    here: bool = False
    """Whether the recipe would run on this machine."""
    gpu: Optional[str] = None
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def in_python(self) -> bool:
        """Whether the case assigns objects, which a command can't name."""
        return bool(self.assigned) or self.corpus is not None

    def lines(self) -> list[str]:
        """The form in which a user would request it: the command, or the lines of Python around it."""
        if not self.in_python:
            return [self._command()]
        lines = [f"recipe = llm.{self.recipe}.pretrain_recipe()"]
        lines += [f"recipe.{path} = {value!r}" for path, value in self.assigned.items()]
        if self.corpus is not None:
            arguments = ", ".join(f"{name}={value!r}" for name, value in self.corpus.items())
            arguments += ", tokenizer=ByteTokenizer()"
            lines.append(f"recipe.data = Config(PreTrainingDataModule, {arguments})")
        where = f", devices={self.devices}" if self.devices is not None else ""
        return [*lines, f"check_recipe(recipe{where}{', local=True' if self.here else ''})"]

    def _command(self) -> str:
        words = ["nemo2", "check", self.recipe, *self.changes]
        if self.here:
            words.append("--here")
        if self.gpu:
            words += ["--gpus", self.gpu]
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        return " ".join([*map(shlex.quote, variables), *map(shlex.quote, words)])


@dataclass(frozen=True)
class Example:
    """A rule by its name, a case that breaks it, and the nearest case that satisfies all rules."""

    rule: str
    broken: Case
    mended: Case


def sides(changes: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The changes of a broken and of a mended case, as on a command line: of ``path=bad->good`` each has its value, and
    ``change->`` and ``->change`` are of one case alone."""
    broken, mended = [], []
    for word in shlex.split(changes):
        left, arrow, right = word.partition("->")
        broken += [left] if left else []
        if not arrow:
            mended.append(left)
        elif right:
            mended.append(f"{left.partition('=')[0]}={right}" if left else right)
    return tuple(broken), tuple(mended)


def example(
    rule: str,
    changes: str = "",
    mended: str | None = None,
    *,
    recipe: str = "llama3_8b",
    environment: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {}),
    launched: tuple[int, int] | None = None,
    here: bool = False,
    gpu: tuple[str, str] | None = None,
    corpus: tuple[Mapping[str, Any] | None, Mapping[str, Any] | None] = (None, None),
    assigned: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {}),
) -> Example:
    """An `Example`. Of a pair of values, the first belongs to the broken case, the second to the mended one.

    Args:
        changes: Changes to ``recipe``, as `sides` reads them.
        mended: Those of the mended case, where ``changes`` are of the broken one alone.
        launched: Devices per node that the executor starts. None: two with ``here``, else the trainer's.
        here: The cases run on this machine.
    """
    launched = launched or ((2, 2) if here else None)
    pair = sides(changes) if mended is None else (tuple(shlex.split(changes)), tuple(shlex.split(mended)))
    cases = (
        Case(
            recipe=recipe,
            changes=words,
            corpus=corpus[side],
            assigned=assigned[side],
            devices=launched[side] if launched else None,
            here=here,
            gpu=gpu[side] if gpu else None,
            environment=environment[side],
        )
        for side, words in enumerate(pair)
    )
    return Example(rule, *cases)


def recipe_of(case: Case) -> Any:
    """The case's recipe with its changes."""
    recipe = copy.deepcopy(_unchanged(case.recipe))
    if case.changes:
        recipe = apply_overrides(recipe, case.changes) or recipe
    for path, value in case.assigned.items():
        *parents, name = path.split(".")
        setattr(functools.reduce(getattr, parents, recipe), name, value)
    if case.corpus is not None:
        recipe.data = Config(PreTrainingDataModule, tokenizer=Config(ByteTokenizer), **case.corpus)
    return recipe


_unchanged = functools.cache(recipe_tree)


def problems_of(case: Case) -> list[Problem]:
    """Problems of a case, in words for who typed it: a command, unless it assigns objects."""
    with contextlib.nullcontext() if case.in_python else for_the_command_line(["check"]):
        return find(
            recipe_of(case),
            devices=case.devices,
            local=case.here,
            machine=None if case.gpu is None else Machine.named(case.gpu),
            environment=case.environment,
        )
