# SPDX-License-Identifier: Apache-2.0
"""The form of a rule: a sentence, the arithmetic that detects a violation, a recipe that breaks the rule, and the
nearest recipe that satisfies it.

The two recipes are part of the rule, so that the documentation shows them and a test runs them. This rule must reject
the first recipe, and no rule the second.
"""

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Optional

if TYPE_CHECKING:
    from nemo2.preflight.checks.facts import Facts

Finder = Callable[["Facts"], Iterator[str]]


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

    def lines(self) -> list[str]:
        """The form in which a user would request it: the command, or the lines of Python around it."""
        if self.corpus is None and not self.assigned:
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


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A broken rule: its name, and the message for the user."""

    rule: str
    topic: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A requirement of a run."""

    name: str
    topic: str
    says: str
    """The rule, as a sentence."""
    otherwise: str
    """The consequence for a run that breaks the rule."""
    find: Finder
    """Yields a paragraph for each violation of the rule."""
    broken: Case
    mended: Case
    megatron_refuses: bool
    """Whether Megatron-Core itself raises when such a model is built, possibly late and on the ranks."""
    needs_sizes: bool
    local: bool
    """Whether the rule is applied only to runs on this machine."""
    in_force: Callable[[], bool] = lambda: True
    """Whether the installed versions need the rule. If they don't, the rule finds nothing."""


class Topic:
    """Related rules, in the order in which they are reported.

    Args:
        title: The heading in the documentation.
        needs_sizes: The rules read the parallel sizes, and find nothing if these are not numbers.
        recipe: The recipe that the examples change, unless they name another.
    """

    def __init__(self, title: str, *, needs_sizes: bool = True, recipe: str = "llama3_8b") -> None:
        self.title = title
        self.needs_sizes = needs_sizes
        self.recipe = recipe
        self.rules: list[Rule] = []

    def rule(
        self,
        name: str,
        *,
        broken: str = "",
        mended: str = "",
        recipe: Optional[str] = None,
        megatron_refuses: bool = False,
        environment: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {}),
        launched: tuple[int, int] | None = None,
        here: bool = False,
        local: bool = False,
        in_force: Callable[[], bool] = lambda: True,
        gpu: tuple[str, str] | None = None,
        corpus: tuple[Mapping[str, Any] | None, Mapping[str, Any] | None] = (None, None),
        assigned: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {}),
    ) -> Callable[[Finder], Finder]:
        """Add a rule with the decorated function, which detects violations.

        The function's docstring is the rule as documented: the requirement, and after "Otherwise:" the consequence for a
        run that breaks it.

        ``broken`` and ``mended`` are changes to ``recipe`` as on a command line, separated by spaces. In ``launched``
        (devices per node), ``gpu``, ``environment``, ``corpus`` and ``assigned`` the first value belongs to the broken
        case, the second to the mended one.

        Args:
            here: The cases run on this machine, in two processes unless ``launched`` says otherwise.
            local: The rule is applied only to runs on this machine. Implies ``here``.
            in_force: Whether the installed versions need the rule. If they don't, it finds nothing.
        """
        here = here or local
        launched = launched or ((2, 2) if here else None)

        def add(find: Finder) -> Finder:
            broken_case, mended_case = (
                Case(
                    recipe=recipe or self.recipe,
                    changes=tuple(shlex.split(changes)),
                    corpus=corpus[side],
                    assigned=assigned[side],
                    devices=launched[side] if launched else None,
                    here=here,
                    gpu=gpu[side] if gpu else None,
                    environment=environment[side],
                )
                for side, changes in enumerate((broken, mended))
            )
            says, _, otherwise = " ".join((find.__doc__ or "").split()).partition(" Otherwise: ")
            self.rules.append(
                Rule(
                    name=name,
                    topic=self.title,
                    says=says,
                    otherwise=otherwise,
                    find=find,
                    broken=broken_case,
                    mended=mended_case,
                    megatron_refuses=megatron_refuses,
                    needs_sizes=self.needs_sizes,
                    local=local,
                    in_force=in_force,
                )
            )
            return find

        return add

    def settled(self, name: str, **cases: Any) -> Callable[[Callable[[], None]], None]:
        """Add a rule that `nemo2.mcore.settle` applies: a refusal there carries the rule's name. The decorated
        function has only the docstring. ``cases`` are arguments of `rule`."""

        def add(documented: Callable[[], None]) -> None:
            def refused(facts: "Facts") -> Iterator[str]:
                yield from facts.settled.refused(name)

            refused.__doc__ = documented.__doc__
            self.rule(name, **cases)(refused)

        return add
