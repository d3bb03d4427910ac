# SPDX-License-Identifier: Apache-2.0
"""Every recipe: builds fast and offline, is legal as it ships, travels as text, and says what its golden file says.

After a change that is meant, rewrite the golden files with ``NEMO2_REWRITE_GOLDEN=1 pytest tests/recipes`` and read the
difference.
"""

import functools
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fiddle as fdl
import pytest
from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer

from nemo2 import recipes
from nemo2.config import check_serialisable, flatten, from_json, to_json
from nemo2.config.codegen import same_tree
from nemo2.config.show import format_value
from nemo2.models.walker import shape_of
from nemo2.preflight.checks import find_problems
from support.nightly import each_case

NAMES = recipes.names()
FINETUNED = [name for name in NAMES if hasattr(recipes.get(name), "finetune_recipe")]


@dataclass(frozen=True)
class Variant:
    """``scheme``: of fine-tuning, "none" for all parameters; None: the recipe of pre-training."""

    name: str
    scheme: str | None = None
    performance: bool = False

    def build(self) -> Any:
        options: Any = {"dir": "/runs", "name": "golden", "performance_mode": self.performance}
        if self.scheme is None:
            return recipes.get(self.name).pretrain_recipe(**options)
        return recipes.get(self.name).finetune_recipe(peft_scheme=self.scheme, **options)

    @property
    def golden(self) -> Path:
        folder = Path(__file__).parent / ("golden" if self.scheme is None else "golden_finetune")
        scheme = {None: "", "none": ".full"}.get(self.scheme, f".{self.scheme}")
        return folder / f"{self.name}{scheme}{'.performance' if self.performance else ''}.txt"

    def __str__(self) -> str:
        return self.golden.stem


def finetunes_faster(name: str) -> bool:
    facts = recipes.get(name).FINETUNE
    return facts.performance or (hasattr(facts.of, "tokenizer") and facts.of.performance)


PERFORMANCE = [name for name in NAMES if recipes.get(name).RECIPE.performance is not None]
PRETRAINING = [Variant(name) for name in NAMES] + [Variant(name, performance=True) for name in PERFORMANCE]
FINETUNING = [
    Variant(name, scheme, performance)
    for name in FINETUNED
    for scheme in ("lora", "none")
    for performance in ((False, True) if finetunes_faster(name) else (False,))
]
built = functools.cache(Variant.build)
"""One tree for the tests that only read it."""


@pytest.mark.parametrize("variant", [*PRETRAINING, *FINETUNING], ids=str)
def test_a_recipe_says_what_its_golden_file_says(variant):
    text = "".join(f"{path} = {format_value(value)}\n" for path, value in flatten(built(variant)).items())
    if os.environ.get("NEMO2_REWRITE_GOLDEN"):
        variant.golden.write_text(text)
    assert text == variant.golden.read_text()


@pytest.mark.parametrize("variants", [PRETRAINING, FINETUNING], ids=["pre-training", "fine-tuning"])
def test_every_golden_file_belongs_to_a_recipe(variants):
    assert {*variants[0].golden.parent.iterdir()} == {variant.golden for variant in variants}


# A golden file says all of every variant, every day.
@pytest.mark.parametrize("variant", [*each_case(PRETRAINING), *each_case(FINETUNING)], ids=str)
def test_a_recipe_is_legal_as_it_ships_travels_as_text_and_comes_back_equal(variant):
    recipe, wire = built(variant), ZlibJSONSerializer()
    assert find_problems(recipe) == []
    check_serialisable(recipe)
    assert same_tree(from_json(to_json(recipe)), recipe)
    assert same_tree(wire.deserialize(wire.serialize(recipe)), recipe)


def test_recipes_build_offline(monkeypatch):
    for name in NAMES:
        built(Variant(name))  # imports

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("building a recipe opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    for name in NAMES:
        Variant(name).build()


@pytest.mark.parametrize("name", each_case(PERFORMANCE))
def test_performance_mode_may_be_applied_to_what_has_it_already(name):
    fast = Variant(name, performance=True)
    assert same_tree(recipes.get(name).RECIPE.performance(fast.build()), built(fast))


def test_a_recipe_without_a_performance_mode_refuses_it():
    name = next(name for name in NAMES if name not in PERFORMANCE)
    with pytest.raises(ValueError, match=f"{name} has no performance mode"):
        Variant(name, performance=True).build()


@pytest.mark.parametrize("variant", PRETRAINING, ids=str)
def test_no_callback_is_there_twice_the_layout_divides_the_machines_and_the_batch_and_the_facts_agree(variant):
    facts, recipe = recipes.get(variant.name).RECIPE, built(variant)
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
    if variant.performance:
        return  # the same model
    config = fdl.build(recipes.get(variant.name).model().config)
    vocab_size = facts.vocabulary or facts.data["vocab_size"]
    assert facts.name == variant.name
    assert shape_of(config, vocab_size).parameters == pytest.approx(facts.parameters, rel=0.005)
    assert config.num_attention_heads % facts.layout.tp == 0
