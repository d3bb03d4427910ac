# SPDX-License-Identifier: Apache-2.0
"""All rules by topic, in the order of reports, and their application to a recipe."""

from collections.abc import Iterable

from nemo2.preflight.checks.facts import Facts
from nemo2.preflight.checks.rule import Problem, Rule, Topic
from nemo2.preflight.checks.rules.attention import ATTENTION
from nemo2.preflight.checks.rules.batches import BATCHES
from nemo2.preflight.checks.rules.cadence import CADENCE
from nemo2.preflight.checks.rules.context import CONTEXT
from nemo2.preflight.checks.rules.environment import ENVIRONMENT
from nemo2.preflight.checks.rules.experts import EXPERTS
from nemo2.preflight.checks.rules.finetuning import FINETUNING, PEFT
from nemo2.preflight.checks.rules.graphs import GRAPHS
from nemo2.preflight.checks.rules.launching import FILES, LAUNCH
from nemo2.preflight.checks.rules.model import MODEL
from nemo2.preflight.checks.rules.optimizer import OPTIMIZER
from nemo2.preflight.checks.rules.overlap import OVERLAP
from nemo2.preflight.checks.rules.parts import PARTS
from nemo2.preflight.checks.rules.pipeline import PIPELINE
from nemo2.preflight.checks.rules.precision import PRECISION
from nemo2.preflight.checks.rules.ranks import RANKS, SIZES
from nemo2.preflight.checks.rules.recompute import RECOMPUTE
from nemo2.preflight.checks.rules.settings import AGREEMENT, LAST, SETTINGS
from nemo2.preflight.checks.rules.tensor import TENSOR
from nemo2.preflight.checks.rules.types import TYPES

TOPICS: tuple[Topic, ...] = (
    TYPES,
    LAUNCH,
    SIZES,
    RANKS,
    MODEL,
    TENSOR,
    CONTEXT,
    ATTENTION,
    PIPELINE,
    EXPERTS,
    BATCHES,
    FINETUNING,
    PEFT,
    OVERLAP,
    PRECISION,
    RECOMPUTE,
    GRAPHS,
    OPTIMIZER,
    CADENCE,
    SETTINGS,
    AGREEMENT,
    FILES,
    PARTS,
    ENVIRONMENT,
    LAST,
)
"""The rules by topic, in the order in which they are checked and told."""

RULES: tuple[Rule, ...] = tuple(rule for topic in TOPICS for rule in topic.rules)
"""Every rule of every topic, in that order."""

LAYOUT_TOPICS = frozenset(topic.title for topic in (RANKS, TENSOR, CONTEXT, PIPELINE, EXPERTS, BATCHES))
"""Topics whose problems another layout may solve."""

OF_NUMBERS = ("model-numbers-are-in-range", "data-module-accepts-its-arguments", "optimizer-numbers-are-in-range")
"""The rules about the numbers of single fields (`nemo2.preflight.checks.domains`)."""

LAST_TOPIC = LAST.title
"""The topic that is checked only if no broken rule is one of Megatron-Core's, which would be told twice."""


def is_of_the_layout(problem: Problem) -> bool:
    """Whether another layout may solve a problem. Of a refusal by Megatron-Core: whether its first fix is the strategy's."""
    return problem.topic in LAYOUT_TOPICS or (problem.topic == LAST_TOPIC and problem.message.startswith("strategy."))


def apply_rules(facts: Facts, rules: Iterable[Rule] = RULES) -> list[Problem]:
    """The problems that these rules find in these facts, each sentence once."""
    problems: dict[str, Problem] = {}
    rules = list(rules)
    rules_of = {rule.name: rule for rule in rules}
    for rule in rules:
        if rule.local and not facts.here:
            continue
        if rule.needs_sizes and (not facts.has_layout or facts.layout.size_problems(**facts.sizes)):
            continue
        if rule.topic == LAST_TOPIC and any(rules_of[problem.rule].megatron_refuses for problem in problems.values()):
            continue
        try:
            for message in rule.find(facts):
                if not rule.in_force():
                    break
                problems.setdefault(message, Problem(rule=rule.name, topic=rule.topic, message=message))
        except (ArithmeticError, LookupError, TypeError, ValueError):
            if not problems:
                raise
            # The rule's arithmetic failed on a value that an earlier rule has rejected: infinity, NaN, a short list.
    # A number that no field accepts breaks the rules about its relations to others too.
    refused = {problem.message.partition("=")[0] for problem in problems.values() if problem.rule in OF_NUMBERS}
    return [
        problem
        for problem in problems.values()
        if problem.rule in OF_NUMBERS or problem.message.partition("=")[0] not in refused
    ]
