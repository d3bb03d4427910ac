# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of parallel sizes, against Megatron-Core's own groups in a simulated world."""

import dataclasses
import inspect
import itertools
from typing import Any

import pytest

from nemo2.base.errors import ConfigError
from nemo2.mcore.parallel.layout import GROUP_NAMES, LAYOUT_FIELDS, SIZE_FIELDS, SIZES, Layout, groups_of, rank_order
from support.ranks import simulated_rank

WORLDS = {
    "dp": (Layout(), 4, False),
    "tp-pp": (Layout(tp=2, pp=2), 8, False),
    "tp-cp-dp": (Layout(tp=2, cp=2, sp=True), 16, False),
    "tp-pp before dp": (Layout(tp=2, pp=2), 16, True),
    "ep over dp and tp": (Layout(tp=2, pp=2, ep=4, etp=1), 16, False),
    "ep with etp": (Layout(tp=2, ep=2, etp=2), 8, False),
    "a thousand and more": (Layout(tp=8, pp=4, vp=2, cp=4, sp=True), 1152, False),
}
DESCRIPTIONS = {
    "TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "CONTEXT_PARALLEL_GROUP": "cp",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "DATA_PARALLEL_GROUP": "dp",
    "DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "EXPERT_TENSOR_PARALLEL_GROUP": "etp",
    "EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "EXPERT_DATA_PARALLEL_GROUP": "expert_dp",
}


@pytest.mark.parametrize("name", SIZE_FIELDS)
@pytest.mark.parametrize("value", [0, -1, 2.0, "2", True])
def test_sizes_are_whole_numbers_of_at_least_one(name, value):
    with pytest.raises(ConfigError, match=rf"strategy\.\w+={value!r}: must be a whole number of at least 1"):
        Layout(**{name: value})


@pytest.mark.parametrize(
    ("layout", "world", "replicas"),
    [
        (Layout(), 8, 8),
        (Layout(tp=2, pp=4), 16, 2),
        (Layout(tp=2, cp=2, pp=2), 8, 1),
        (Layout(ep=4), 8, 8),
        (Layout(tp=2, ep=4, etp=1), 8, 4),
    ],
)
def test_replicas_are_what_is_left_of_the_world(layout, world, replicas):
    assert layout.world_problem(world) is None
    assert layout.data_parallel_size(world) == replicas


def test_a_world_too_small_is_told_the_product_and_the_next_size_that_fits():
    with pytest.raises(ConfigError, match=r"4 \* 4 \* 2 = 32 does not divide the world of 40 ranks\. Run on 64 ranks"):
        Layout(tp=4, pp=4, cp=2).data_parallel_size(40)
    assert "world of 1 rank." in str(Layout(tp=2).world_problem(1))


def test_expert_sizes_have_their_own_product_and_say_where_the_tensor_size_came_from():
    problem = Layout(tp=4, ep=4).world_problem(8)
    assert problem is not None
    assert (
        "4 * 4 * 1 = 16 (expert_tensor_parallel_size is unset and therefore equals the tensor-parallel size)" in problem
    )
    assert "(expert" not in str(Layout(tp=4, ep=4, etp=4).world_problem(8))
    assert Layout(tp=4, ep=4, etp=1).world_problem(8) is None


def megatron_accepts(layouts: list[tuple[Layout, int]]) -> list[tuple[bool, int]]:
    """Whether Megatron-Core lays each over a world of fake ranks, and the data-parallel size it finds."""
    from megatron.core import parallel_state

    answers = []
    for layout, world in layouts:
        with simulated_rank(0, world):
            try:
                parallel_state.initialize_model_parallel(
                    tensor_model_parallel_size=layout.tp,
                    pipeline_model_parallel_size=layout.pp,
                    context_parallel_size=layout.cp,
                    expert_model_parallel_size=layout.ep,
                    expert_tensor_parallel_size=layout.etp,
                    create_gloo_process_groups=False,
                )
                answers.append((True, parallel_state.get_data_parallel_world_size()))
            except (RuntimeError, AssertionError):
                answers.append((False, 0))
    return answers


def test_legal_is_what_megatron_core_accepts(run_on_ranks):
    layouts = [
        (Layout(tp=tp, pp=pp, cp=cp, ep=ep, etp=etp), world)
        for tp, pp, cp, ep, etp, world in itertools.product((1, 2), (1, 2), (1, 3), (1, 2), (None, 1), (2, 6, 12))
    ]
    answers = run_on_ranks(megatron_accepts, 1, layouts, init_process_group=False)[0]
    assert {accepted for accepted, _ in answers} == {True, False}
    for (layout, world), (accepted, replicas) in zip(layouts, answers, strict=True):
        problem = layout.world_problem(world)
        assert (problem is None) == accepted, (layout, world, problem)
        assert (world % layout.smallest_world == 0) == accepted
        if accepted:
            assert layout.data_parallel_size(world) == replicas


def groups_in_fact(cases: dict[str, tuple[Layout, int, bool]]) -> dict[str, dict[str, list[tuple[int, ...]]]]:
    """Every group that Megatron-Core asks torch for, as rank 0 of a world that isn't there."""
    from megatron.core import parallel_state

    from nemo2.base.backend import get_backend

    get_backend().install()
    found = {}
    for name, (layout, world, tp_pp_dp) in cases.items():
        with simulated_rank(0, world):
            made: dict[str, list[tuple[int, ...]]] = {}
            original = parallel_state.create_group

            def create_group(
                ranks: Any = None,
                *args: Any,
                group_desc: Any = None,
                made: dict = made,
                original: Any = original,
                **kwargs: Any,
            ) -> Any:
                if group_desc in DESCRIPTIONS:
                    made.setdefault(DESCRIPTIONS[group_desc], []).append(tuple(ranks))
                # The others' groups are only looked at; making thousands of them takes a minute.
                return original(ranks, *args, group_desc=group_desc, **kwargs) if 0 in ranks else None

            parallel_state.create_group = create_group
            try:
                parallel_state.initialize_model_parallel(
                    layout.tp,
                    layout.pp,
                    layout.vp,
                    context_parallel_size=layout.cp,
                    expert_model_parallel_size=layout.ep,
                    expert_tensor_parallel_size=layout.etp,
                    order=rank_order(tp_pp_dp=tp_pp_dp),
                    create_gloo_process_groups=False,
                )
            finally:
                parallel_state.create_group = original
            found[name] = made
    return found


@pytest.fixture(scope="module")
def made(run_on_ranks):
    return run_on_ranks(groups_in_fact, 1, WORLDS, init_process_group=False)[0]


@pytest.mark.parametrize("name", WORLDS)
def test_groups_are_those_that_megatron_core_makes(name, made):
    layout, world, tp_pp_dp = WORLDS[name]
    ours = groups_of(layout, world, order=rank_order(tp_pp_dp=tp_pp_dp))
    assert set(ours) == set(GROUP_NAMES) == set(made[name])
    for kind, groups in made[name].items():
        assert ours[kind] == tuple(groups), kind


@pytest.mark.parametrize(
    ("layout", "world", "message"),
    [
        (Layout(tp=4, pp=2), 12, r"does not divide the world of 12 ranks\. Run on 16 ranks"),
        (Layout(ep=8), 4, "does not divide the world of 4 ranks"),
        (Layout(etp=3), 4, "3 \\* 1 \\* 1 = 3 does not divide the world of 4"),
    ],
)
def test_a_world_that_does_not_fit_is_refused(layout, world, message):
    with pytest.raises(ConfigError, match=message):
        groups_of(layout, world)


@pytest.mark.parametrize("layout", [Layout(tp=2, pp=2, ep=4, etp=1), Layout(tp=2, pp=2, cp=2)])
def test_numbering_stages_before_replicas_needs_the_experts_to_have_as_many_replicas(layout):
    with pytest.raises(ConfigError, match="use_tp_pp_dp_mapping=True"):
        groups_of(layout, 16, order=rank_order(tp_pp_dp=True))


def test_a_layout_is_described_in_one_line_without_sizes_of_one():
    assert Layout(tp=2, sp=True, pp=4, vp=2, cp=2).describe(128) == "TP 2 (SP) · PP 4 x VP 2 · CP 2 · DP 8"
    assert Layout(tp=2, ep=8, etp=1).describe() == "TP 2 · EP 8 · ETP 1"
    assert Layout().describe() == "one rank"


def test_every_size_is_one_row_that_the_layout_the_strategy_and_megatron_core_know() -> None:
    from megatron.core.parallel_state import initialize_model_parallel
    from megatron.core.transformer import TransformerConfig

    from nemo2.training.strategy import MegatronStrategy

    assert {field.name for field in dataclasses.fields(Layout)} == set(LAYOUT_FIELDS)
    taken = inspect.signature(MegatronStrategy.__init__).parameters
    assert {name for name in taken if name.endswith("_parallel_size") and "encoder" not in name} == {
        size.name for size in SIZES
    }
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    assert {size.name for size in SIZES} <= fields & set(inspect.signature(initialize_model_parallel).parameters)
    for size in SIZES:
        assert bool(Layout.size_problems(**{size.short: None})) is not size.optional


def test_a_layout_is_read_off_a_strategy_and_says_how_to_get_it() -> None:
    from types import SimpleNamespace

    one = Layout(tp=2, pp=4, vp=2, ep=2, etp=1, sp=True)
    assert Layout.of(SimpleNamespace(**one.fields())) == one
    assert Layout.of(SimpleNamespace(tensor_parallel_size=3, context_parallel_size=2)) == Layout(tp=3, cp=2)
    assert Layout.of(SimpleNamespace(tensor_parallel_size="auto")) == Layout()
    assert one.overrides(dataclasses.asdict(Layout(tp=2, pp=4, vp=2, ep=4))) == [
        "strategy.expert_model_parallel_size=2",
        "strategy.expert_tensor_parallel_size=1",
        "strategy.sequence_parallel=True",
    ]
    assert Layout(vp=None).overrides(dataclasses.asdict(Layout(vp=1))) == []
