# SPDX-License-Identifier: Apache-2.0
"""Every rule from both sides: the recipe that breaks it is refused, the nearest one is not, and Megatron-Core agrees.
docs/checks.md says the same."""

import re
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fiddle as fdl
import pytest
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo2.base.errors import ConfigError
from nemo2.callbacks import ModelTransform
from nemo2.config import Config
from nemo2.mcore.settle.machine import Machine
from nemo2.models.peft import DoRA
from nemo2.preflight.checks.parts import check_parts
from nemo2.preflight.checks.table import RULES, TOPICS
from support.megatron_verdict import verdicts
from support.nightly import each_case, requested
from support.rule_cases import Case, Example, problems_of, recipe_of
from support.rule_examples import EXAMPLES
from tools import checks_page

RULE = {rule.name: rule for rule in RULES}
FROM_PYTHON = [one for one in EXAMPLES if not one.broken.here and one.broken.devices is None]
FIRST = {one.rule: one for one in reversed(EXAMPLES)}
REFUSED = [FIRST[name] for name, rule in RULE.items() if rule.megatron_refuses]
"""The first example of each rule that stands for a refusal by Megatron-Core. The others may have consequences of their own."""
WORDS_OF_THE_VERSION = ("optimizer-is-known", "megatron-core-agrees")
"""Rules whose messages quote the installed Megatron-Core."""
each_example = pytest.mark.parametrize("example", EXAMPLES, ids=lambda one: one.rule)


@pytest.fixture(scope="module")
def problems_once() -> Callable[[Case], list[Any]]:
    """`problems_of`, remembered: the page needs what the rules' own tests need."""
    seen: dict[str, list[Any]] = {}

    def problems(case: Case) -> list[Any]:
        if repr(case) not in seen:
            seen[repr(case)] = problems_of(case)
        return seen[repr(case)]

    return problems


@pytest.fixture(scope="module")
def megatron(run_on_ranks: Any, request: pytest.FixtureRequest) -> dict[str, str | None]:
    """Megatron-Core's verdict on the recipes that this session asks about, those that break a rule only where it has one."""
    examples: list[Example] = requested(request, "example")
    cases = [one.mended for one in examples] + [one.broken for one in examples if one in REFUSED]
    distinct = {repr(case): case for case in cases}
    answers = run_on_ranks(verdicts, 1, list(distinct.values()), init_process_group=False, timeout=280)[0]
    return dict(zip(distinct, answers, strict=True))


@each_example
def test_the_broken_recipe_is_refused_by_its_rule(example: Example, problems_once: Any) -> None:
    messages = [problem.message for problem in problems_once(example.broken) if problem.rule == example.rule]
    assert bool(messages) == RULE[example.rule].in_force()
    for message in messages:
        assert message.endswith((".", "?")) or example.rule in ("megatron-core-agrees", "data-is-there"), message


@pytest.mark.parametrize("example", each_case(EXAMPLES, FIRST.values()), ids=lambda one: one.rule)
def test_the_mended_recipe_is_refused_by_none(example: Example, problems_once: Any) -> None:
    assert problems_once(example.mended) == []


@pytest.mark.parametrize("example", each_case(FROM_PYTHON, FROM_PYTHON[::6]), ids=lambda one: one.rule)
def test_a_run_from_python_refuses_what_a_command_refuses(example: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipes' parts are built, as in a script. The run itself meets the rules about files and packages of this
    machine."""
    monkeypatch.setattr("nemo2.training.trainer.check_devices", lambda **asked: None)
    for name, value in example.broken.environment.items():
        monkeypatch.setenv(name, value)
    refused = None
    try:
        _judge_parts(example.broken)
    except Exception as error:  # a constructor of another library may raise anything
        refused = error
    assert (refused is not None) == RULE[example.rule].in_force()
    if isinstance(refused, ConfigError) and refused.rule is not None:
        assert example.rule == refused.rule, refused
    for name in example.broken.environment:
        monkeypatch.delenv(name)
    for name, value in example.mended.environment.items():
        monkeypatch.setenv(name, value)
    try:
        _judge_parts(example.mended)
    except Exception as error:
        assert "use_precision_aware_optimizer=True" in str(error)  # this machine has no Transformer Engine


def _judge_parts(case: Case) -> None:
    recipe = recipe_of(case)
    gpu = Machine.named(case.gpu) if case.gpu else Machine()
    built = {name: fdl.build(part) for name, part in recipe.__arguments__.items() if isinstance(part, fdl.Buildable)}
    with unittest.mock.patch.object(Machine, "here", lambda: gpu):
        check_parts(recipe.__fn_or_cls__, {**recipe.__arguments__, **built})


@pytest.mark.quick
@pytest.mark.parametrize("example", each_case(EXAMPLES, REFUSED[::4]), ids=lambda one: one.rule)
def test_megatron_core_builds_the_mended_recipe(example: Example, megatron: dict[str, str | None]) -> None:
    assert megatron[repr(example.mended)] is None


@pytest.mark.quick
@pytest.mark.parametrize("example", REFUSED, ids=lambda one: one.rule)
def test_megatron_core_refuses_the_broken_recipe(example: Example, megatron: dict[str, str | None]) -> None:
    assert megatron[repr(example.broken)] is not None


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ("data.global_batch_size=3", "batch-over-replicas"),
        ("strategy.context_parallel_size=2 data.seq_length=126", "sequence-in-twice-the-context-ranks"),
        ("model.config.sequence_parallel=True", "megatron-core-agrees"),
        ("model.config.tensor_model_parallel_size=2", "sizes-on-the-strategy"),
        ("model.config.bf16=False", "one-precision"),
        ("model.config.recompute_granularity=full", "full-recomputation-says-how"),
        ("model.config.fp8=hybrid", "torch-shards-what-is-requested"),
        *(
            [("model.config.mtp_num_layers=1 model.config.mtp_detach_heads=True", "torch-shards-what-is-requested")]
            if hasattr(TransformerConfig, "mtp_detach_heads")  # not in 0.16
            else []
        ),
        ("trainer.precision=bf16-mixed", "one-precision-setting"),
        ("trainer.accumulate_grad_batches=2", "steps-are-megatron-cores"),
        ("strategy.sequence_parallel=True", "strategy-settings-are-supported"),
    ],
)
def test_models_that_torch_shards_are_judged_by_the_rules_of_layouts_too(changes: str, rule: str) -> None:
    case = Case(recipe="llama_tiny", changes=("trainer.strategy=FSDP2Strategy", *changes.split()), devices=2)
    assert [problem.rule for problem in problems_of(case)] == [rule]


@pytest.mark.parametrize("place", ["model.model_transform", "trainer.callbacks"])
def test_a_peft_method_is_judged_wherever_it_stands(place: str) -> None:
    method = Config(DoRA)
    assigned = {place: method if place.startswith("model") else [Config(ModelTransform, model_transform=method)]}
    case = Case(recipe="llama_tiny", changes=("trainer.strategy=FSDPStrategy",), assigned=assigned, devices=2)
    assert [problem.rule for problem in problems_of(case)] == ["adapters-read-whole-weights"]


@pytest.mark.skipif(
    not hasattr(OptimizerConfig, "grad_norm_skip_threshold"), reason="Megatron-Core has no such threshold"
)
@pytest.mark.parametrize(("threshold", "rules"), [("1.0", ["megatron-fsdp-runs-what-is-requested"]), ("inf", [])])
def test_megatron_fsdp_skips_no_steps(threshold: str, rules: list[str]) -> None:
    layout = ("tensor_model_parallel_size=1", "sequence_parallel=False", "fsdp=megatron")
    changes = (*(f"strategy.{one}" for one in layout), f"optim.config.grad_norm_skip_threshold={threshold}")
    case = Case(recipe="llama_tiny", changes=changes, devices=2)
    assert [problem.rule for problem in problems_of(case)] == rules


def test_where_all_layers_have_experts_only_the_experts_width_is_cut(run_on_ranks: Any) -> None:
    layout = (
        "tensor_model_parallel_size=4",
        "sequence_parallel=True",
        "expert_tensor_parallel_size=1",
        "expert_model_parallel_size=2",
    )
    experts = ("num_moe_experts=4", "moe_router_topk=2", "ffn_hidden_size=126")
    changes = ["trainer.devices=4", *(f"strategy.{one}" for one in layout), *(f"model.config.{one}" for one in experts)]
    case = Case(recipe="llama_tiny", changes=tuple(changes))
    mixed = Case(recipe="llama_tiny", changes=(*changes, "model.config.moe_layer_freq=2"))
    assert run_on_ranks(verdicts, 1, [case], init_process_group=False) == [[None]] and problems_of(case) == []
    assert [problem.rule for problem in problems_of(mixed)] == ["feed-forward-over-tensor-ranks"]


def test_each_rule_has_a_name_of_its_own_a_sentence_and_examples() -> None:
    names = [rule.name for rule in RULES]
    assert list(dict.fromkeys(one.rule for one in EXAMPLES)) == names and len(set(names)) == len(names) >= 60
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", name) for name in names)
    assert all(rule.says.endswith(".") and rule.otherwise.endswith(".") for rule in RULES)
    assert len({topic.title for topic in TOPICS}) == len(TOPICS)


def test_the_two_recipes_of_an_example_differ() -> None:
    assert [one.rule for one in EXAMPLES if one.broken == one.mended] == []


@pytest.mark.slow
def test_the_page_is_written_from_the_rules(problems_once: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_page, "problems_of", problems_once)
    page = Path(__file__).parents[4] / "docs" / "checks.md"
    written, made = sections(page.read_text()), sections(checks_page.page())
    assert list(written) == list(made)
    for name, text in made.items():
        unused = name in RULE and not RULE[name].in_force()
        assert unused or written[name] == text, f"{name}: run python -m tools.checks_page > docs/checks.md"
    assert RULE.keys() <= made.keys()


def sections(text: str) -> dict[str, str]:
    """The parts of the page by their headings; without what Megatron-Core says in its own words."""
    parts = re.split(r"^#+ (.+)$", text, flags=re.MULTILINE)
    named = dict(zip(parts[1::2], parts[2::2], strict=True))
    return {
        name: re.sub(r"^> .*$", "", part, flags=re.MULTILINE) if name in WORDS_OF_THE_VERSION else part
        for name, part in named.items()
    }
