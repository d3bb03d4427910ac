# SPDX-License-Identifier: Apache-2.0
"""Every rule from both sides: the recipe that breaks it is refused, the nearest one is not, and Megatron-Core agrees."""

import re
import unittest.mock
from typing import Any

import fiddle as fdl
import pytest

from nemo2.errors import ConfigError
from nemo2.mcore.settle.machine import Machine
from nemo2.preflight.checks import RULES, TOPICS
from nemo2.preflight.checks.find import check_parts
from nemo2.preflight.checks.rule import Case, Rule
from support.megatron_verdict import verdicts
from support.nightly import each_case, requested
from support.rule_examples import recipe_of

FROM_PYTHON = [rule for rule in RULES if not rule.broken.here and rule.broken.devices is None]
each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)


@pytest.fixture(scope="module")
def megatron(run_on_ranks: Any, request: pytest.FixtureRequest) -> dict[tuple[str, str], str | None]:
    """Megatron-Core's verdict on the two recipes of each rule that this session asks about, of those where it has one."""
    rules: list[Rule] = requested(request, "rule")
    wanted = [(rule.name, "mended", rule.mended) for rule in rules]
    wanted += [(rule.name, "broken", rule.broken) for rule in rules if rule.megatron_refuses]
    distinct = {repr(case): case for _, _, case in wanted}
    answers = run_on_ranks(verdicts, 1, list(distinct.values()), init_process_group=False, timeout=280)[0]
    by_case = dict(zip(distinct, answers, strict=True))
    return {(name, side): by_case[repr(case)] for name, side, case in wanted}


@each_rule
def test_the_broken_recipe_is_refused_by_its_rule(rule: Rule, problems_once: Any) -> None:
    told = [problem.message for problem in problems_once(rule.broken) if problem.rule == rule.name]
    assert bool(told) == rule.in_force()
    for message in told:
        assert message.endswith((".", "?")) or rule.name in ("megatron-core-agrees", "data-is-there"), message


@each_rule
def test_the_mended_recipe_is_refused_by_none(rule: Rule, problems_once: Any) -> None:
    assert problems_once(rule.mended) == []


@pytest.mark.parametrize("rule", each_case(FROM_PYTHON, FROM_PYTHON[::3]), ids=lambda rule: rule.name)
def test_a_run_from_python_refuses_what_a_command_refuses(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipes' parts are built, as in a script. The run itself meets the rules about files and packages of this
    machine."""
    monkeypatch.setattr("nemo2.training.trainer.check_devices", lambda **asked: None)
    for name, value in rule.broken.environment.items():
        monkeypatch.setenv(name, value)
    refused = None
    try:
        _judge_parts(rule.broken)
    except Exception as error:  # a constructor of another library may raise anything
        refused = error
    assert (refused is not None) == rule.in_force()
    if isinstance(refused, ConfigError) and refused.rule is not None:
        assert rule.name == refused.rule, refused
    for name in rule.broken.environment:
        monkeypatch.delenv(name)
    for name, value in rule.mended.environment.items():
        monkeypatch.setenv(name, value)
    try:
        _judge_parts(rule.mended)
    except Exception as error:
        assert "use_precision_aware_optimizer=True" in str(error)  # this machine has no Transformer Engine


def _judge_parts(case: Case) -> None:
    recipe = recipe_of(case)
    gpu = Machine.named(case.gpu) if case.gpu else Machine()
    built = {name: fdl.build(part) for name, part in recipe.__arguments__.items() if isinstance(part, fdl.Buildable)}
    with unittest.mock.patch.object(Machine, "here", lambda: gpu):
        check_parts(recipe.__fn_or_cls__, {**recipe.__arguments__, **built})


@pytest.mark.quick
@pytest.mark.parametrize(
    "rule", each_case(RULES, [rule for rule in RULES if rule.megatron_refuses]), ids=lambda rule: rule.name
)
def test_megatron_core_builds_the_mended_recipe(rule: Rule, megatron: dict[tuple[str, str], str | None]) -> None:
    assert megatron[rule.name, "mended"] is None


@pytest.mark.quick
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.megatron_refuses], ids=lambda rule: rule.name)
def test_megatron_core_refuses_the_broken_recipe(rule: Rule, megatron: dict[tuple[str, str], str | None]) -> None:
    assert megatron[rule.name, "broken"] is not None


def test_there_are_at_least_sixty_rules_with_names_of_their_own() -> None:
    names = [rule.name for rule in RULES]
    assert len(set(names)) == len(names) >= 60
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", name) for name in names)
    assert all(rule.says.endswith(".") and rule.otherwise.endswith(".") for rule in RULES)
    assert len({topic.title for topic in TOPICS}) == len(TOPICS)


def test_the_two_recipes_of_a_rule_differ() -> None:
    assert [rule.name for rule in RULES if rule.broken == rule.mended] == []
