# SPDX-License-Identifier: Apache-2.0
"""Every recipe: builds fast and offline, is legal as it ships, travels as text, and says what its golden file says.

After a change that is meant, rewrite the golden files with ``NEMO2_REWRITE_GOLDEN=1 pytest tests/recipes`` and read the
difference.
"""

import functools
import os
import socket
from pathlib import Path
from typing import Any

import fiddle as fdl
import pytest

from nemo2 import recipes
from nemo2.config import check_serialisable, flatten, from_json, to_json
from nemo2.config.codegen import same_tree
from nemo2.config.show import format_value
from nemo2.models.walker import shape_of
from nemo2.preflight.checks import find_problems
from support.nightly import daily_sample

GOLDEN = Path(__file__).parent / "golden"
NAMES = recipes.names()
PERFORMANCE = [name for name in NAMES if recipes.get(name).RECIPE.performance is not None]
VARIANTS = [(name, False) for name in NAMES] + [(name, True) for name in PERFORMANCE]
SAMPLE = daily_sample(VARIANTS)
"""A golden file says all of every variant, every day."""


def build(name: str, performance_mode: bool = False) -> Any:
    return recipes.get(name).pretrain_recipe(dir="/runs", name="golden", performance_mode=performance_mode)


built = functools.cache(build)
"""One tree for the tests that only read it."""


@pytest.mark.parametrize(("name", "performance_mode"), VARIANTS)
def test_a_recipe_says_what_its_golden_file_says(name: str, performance_mode: bool) -> None:
    lines = [f"{path} = {format_value(value)}" for path, value in flatten(built(name, performance_mode)).items()]
    text = "\n".join(lines) + "\n"
    file = GOLDEN / f"{name}{'.performance' if performance_mode else ''}.txt"
    if os.environ.get("NEMO2_REWRITE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()


def test_every_golden_file_belongs_to_a_recipe() -> None:
    expected = {f"{name}{'.performance' if mode else ''}.txt" for name, mode in VARIANTS}
    assert {file.name for file in GOLDEN.iterdir()} == expected


@pytest.mark.parametrize(("name", "performance_mode"), SAMPLE)
def test_a_recipe_travels_as_text_and_comes_back_equal(name: str, performance_mode: bool) -> None:
    from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer

    recipe = built(name, performance_mode)
    check_serialisable(recipe)
    assert same_tree(from_json(to_json(recipe)), recipe)
    wire = ZlibJSONSerializer()
    assert same_tree(wire.deserialize(wire.serialize(recipe)), recipe)


def test_recipes_build_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        built(name)  # imports

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("building a recipe opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    for name in NAMES:
        build(name)


@pytest.mark.parametrize("name", daily_sample(PERFORMANCE))
def test_performance_mode_may_be_applied_to_what_has_it_already(name: str) -> None:
    assert same_tree(recipes.get(name).RECIPE.performance(build(name, True)), built(name, True))


def test_a_recipe_without_a_performance_mode_refuses_it() -> None:
    name = next(name for name in NAMES if name not in PERFORMANCE)
    with pytest.raises(ValueError, match=f"{name} has no performance mode"):
        build(name, performance_mode=True)


@pytest.mark.parametrize(("name", "performance_mode"), SAMPLE)
def test_a_recipe_passes_the_check_before_launch_as_it_ships(name: str, performance_mode: bool) -> None:
    assert find_problems(built(name, performance_mode)) == []


@pytest.mark.parametrize(("name", "performance_mode"), VARIANTS)
def test_no_callback_is_there_twice_and_the_layout_divides_the_machines_and_the_batch(
    name: str, performance_mode: bool
) -> None:
    recipe = built(name, performance_mode)
    strategy, trainer, data = recipe.strategy, recipe.trainer, recipe.data
    classes = [fdl.get_callable(callback) for callback in trainer.callbacks]
    assert len(classes) == len(set(classes))
    model_parallel = (
        strategy.tensor_model_parallel_size * strategy.pipeline_model_parallel_size * strategy.context_parallel_size
    )
    replicas, left = divmod(trainer.devices * trainer.num_nodes, model_parallel)
    assert left == 0
    assert data.global_batch_size % (data.micro_batch_size * replicas) == 0
    assert data.seq_length % (2 * strategy.context_parallel_size) == 0
    assert not (strategy.sequence_parallel and strategy.tensor_model_parallel_size == 1)


@pytest.mark.parametrize("name", NAMES)
def test_the_facts_agree_with_the_model(name: str) -> None:
    facts = recipes.get(name).RECIPE
    config = fdl.build(recipes.get(name).model().config)
    vocab_size = facts.vocabulary or facts.data["vocab_size"]
    assert facts.name == name
    assert shape_of(config, vocab_size).parameters == pytest.approx(facts.parameters, rel=0.005)
    assert config.num_attention_heads % facts.layout.tp == 0
