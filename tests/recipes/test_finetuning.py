# SPDX-License-Identifier: Apache-2.0
"""Recipes of fine-tuning: what NeMo has, and what their arguments change. Their golden files: `test_all_recipes`."""

from pathlib import Path
from typing import Any

import fiddle as fdl
import pytest

from nemo2 import llm, recipes
from nemo2.config import who_set
from nemo2.config.codegen import same_tree
from nemo2.models.peft import DoRA
from nemo2.preflight.checks import find_problems
from nemo2.recipes.finetune_default import default_finetune_recipe, default_finetune_trainer, nemo_resume
from support.nightly import each_case

NAMES = [name for name in recipes.names() if hasattr(recipes.get(name), "finetune_recipe")]
_NAMES_OF_NEMO = Path(__file__).parents[2].joinpath("tools", "nemo_names.txt").read_text()
NEMOS_RECIPES = _NAMES_OF_NEMO.partition("llm, recipes\n")[2].partition("\n\n")[0]
NEMOS = 72
"""Recipes of NeMo 2.0 that fine-tune a Megatron model."""


def build(name: str, scheme: str, fast: bool = False, **arguments: Any) -> Any:
    make = recipes.get(name).finetune_recipe
    return make(dir="/runs", name="golden", peft_scheme=scheme, performance_mode=fast, **arguments)


def test_every_model_that_nemo_fine_tunes_is_there():
    assert len({*NEMOS_RECIPES.split()} & {*NAMES}) == NEMOS


@pytest.mark.parametrize("name", each_case(NAMES))
def test_dora_is_lora_with_lengths(name):
    lora, dora = build(name, "lora"), build(name, "DoRA")
    assert fdl.get_callable(dora.peft) is DoRA
    fdl.update_callable(lora.peft, DoRA)
    assert same_tree(lora, dora)


@pytest.mark.parametrize("name", ["llama3_8b", "qwen2_7b", "mamba2_130m", "nemotronh_8b"])
def test_another_scheme_is_refused(name):
    with pytest.raises(ValueError, match="Unrecognized peft scheme: invalid_scheme"):
        build(name, "invalid_scheme")


def test_the_scheme_decides_the_machines_unless_they_are_named():
    facts = recipes.get("qwen2_72b")
    assert facts.finetune_recipe().trainer.num_nodes == 1
    assert facts.finetune_recipe(peft_scheme=None).trainer.num_nodes == 4
    asked = facts.finetune_recipe(num_nodes=3, num_gpus_per_node=5, peft_scheme="none")
    assert (asked.trainer.num_nodes, asked.trainer.devices) == (3, 5)


@pytest.mark.parametrize(
    ("name", "arguments", "length", "batch"),
    [
        ("llama3_8b", {}, 4096, 8),
        ("llama3_8b", {"seq_length": 8192}, 8192, 8),
        ("qwen3_8b", {}, 2048, 8),
        ("gemma_7b", {"seq_length": 1024}, 1024, 8),
        ("llama31_405b", {}, 2048, 6),
        ("nemotronh_8b", {}, 8192, 768),
    ],
)
def test_packed_rows_are_as_long_as_sequences(name, arguments, length, batch):
    recipe = recipes.get(name).finetune_recipe(packed_sequence=True, **arguments)
    assert recipe.data.seq_length == recipe.data.packed_sequence_specs.packed_sequence_size == length
    assert (recipe.data.global_batch_size, recipe.data.micro_batch_size) == (batch, 1)
    assert find_problems(recipe) == []


def test_performance_mode_packs_and_may_be_told_not_to():
    assert hasattr(build("llama3_8b", "lora", True).data.packed_sequence_specs, "packed_sequence_size")
    assert build("llama3_8b", "lora", True, packed_sequence=False).data.packed_sequence_specs is None
    with pytest.raises(ValueError, match="qwen2_7b has no performance mode of fine-tuning"):
        build("qwen2_7b", "lora", True)


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("meta-llama/Llama-3.2-1B", "nemo://meta-llama/Llama-3.2-1B"),
        ("hf:///models/llama", "hf:///models/llama"),
        ("/runs/base", "/runs/base"),
        ("./base", "./base"),
    ],
)
def test_weights_are_named_as_nemo_names_them_or_by_path(given, path):
    assert nemo_resume(given).restore_config.path == path
    assert recipes.get("llama3_8b").finetune_recipe(resume_path=given).resume.restore_config.path == path


def test_the_default_recipe_takes_any_model():
    recipe: Any = default_finetune_recipe(llm.llama32_1b.model(), "meta-llama/Llama-3.2-1B", packed_sequence=True)
    assert (recipe.data.global_batch_size, recipe.data.packed_sequence_specs.packed_sequence_size) == (8, 2048)
    assert default_finetune_trainer(tensor_parallelism=4).strategy.tensor_model_parallel_size == 4


def test_a_fact_is_set_where_it_is_stated():
    recipe = recipes.get("llama3_70b").finetune_recipe()
    [*_, (file, _, value)] = who_set(recipe.trainer.strategy, "tensor_model_parallel_size")
    assert (Path(file).name, value) == ("llama3_70b.py", 8)


def test_facts_that_contradict_each_other_are_refused():
    from nemo2.recipes._finetuning import On

    with pytest.raises(ValueError, match="llama3_8b, fine-tuned,.*global_batch_size=128"):
        recipes.get("llama3_8b").FINETUNE.but(lora=On(nodes=3))
