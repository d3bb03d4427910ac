# SPDX-License-Identifier: Apache-2.0
"""The form of a rule: a requirement in words, and the function that finds what breaks it. docs/checks.md has examples."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo2.preflight.checks.facts import Facts

Finder = Callable[["Facts"], Iterator[str]]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A broken rule."""

    rule: str
    """The rule's name, as in docs/checks.md."""
    topic: str
    """The heading there."""
    message: str
    """What the user reads: the field, its value, the requirement and the fix."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A requirement of a run."""

    name: str
    """As in docs/checks.md and in a refusal."""
    topic: str
    """The heading there."""
    find: Finder
    """Yields a paragraph for each violation of the rule. Its docstring is the rule as documented: the requirement, and after
    "Otherwise:" the consequence for a run that breaks it."""
    megatron_refuses: bool = False
    """Whether Megatron-Core itself raises when such a model is built, possibly late and on the ranks."""
    needs_sizes: bool
    """Whether the rule is applied only where the parallel sizes are valid numbers."""
    local: bool = False
    """Whether the rule is applied only to runs on this machine."""
    in_force: Callable[[], bool] = lambda: True
    """Whether the installed versions need the rule. If they don't, the rule finds nothing."""

    @property
    def says(self) -> str:
        """The rule, as a sentence."""
        return self._documented()[0]

    @property
    def otherwise(self) -> str:
        """The consequence for a run that breaks the rule."""
        return self._documented()[2]

    def _documented(self) -> tuple[str, str, str]:
        return " ".join((self.find.__doc__ or "").split()).partition(" Otherwise: ")


class Topic:
    """Related rules, in the order in which they are reported.

    Args:
        title: The heading in the documentation.
        needs_sizes: The rules read the parallel sizes, and find nothing if these are not numbers.
    """

    def __init__(self, title: str, *, needs_sizes: bool = True) -> None:
        self.title = title
        self.needs_sizes = needs_sizes
        self.rules: list[Rule] = []

    def rule(self, name: str, **traits: Any) -> Callable[[Finder], Finder]:
        """Add a rule with the decorated function, the rule's ``find``. ``traits``: fields of `Rule` with a default."""

        def add(find: Finder) -> Finder:
            self.rules.append(Rule(name=name, topic=self.title, find=find, needs_sizes=self.needs_sizes, **traits))
            return find

        return add

    def settled(self, name: str) -> Callable[[Callable[[], None]], None]:
        """Add a rule that `nemo2.mcore.settle` applies: a refusal there carries the rule's name. The decorated
        function has only the docstring."""

        def add(documented: Callable[[], None]) -> None:
            def refused(facts: "Facts") -> Iterator[str]:
                yield from facts.settled.refused(name)

            refused.__doc__ = documented.__doc__
            self.rule(name)(refused)

        return add
