# SPDX-License-Identifier: Apache-2.0
"""The parameters of a recipe's model, with the vocabulary of its run, and the share that adapters train."""

import pytest

from nemo2 import recipes
from nemo2.mcore.settle.machine import Machine
from nemo2.preflight.planner.size import size_of


@pytest.mark.parametrize("name", ["llama_tiny", "llama31_8b", "mixtral_8x7b", "gemma2_9b"])
def test_the_released_vocabulary_gives_the_number_of_parameters_that_list_prints(name: str) -> None:
    facts = recipes.get(name).RECIPE
    recipe = recipes.get(name).pretrain_recipe()
    recipe.model.config.vocab_size = (
        facts.vocab_size if hasattr(facts, "vocab_size") else recipe.model.config.vocab_size
    )
    size = size_of(recipe, Machine())
    assert size is not None and size.adapters is None
    assert f"{size.parameters:.3g}" == f"{int(facts.parameters):.3g}" or size.vocabulary < 60_000


def test_another_vocabulary_is_said_with_its_count() -> None:
    recipe = recipes.get("llama3_8b").pretrain_recipe()
    recipe.model.config.vocab_size = 1024
    size = size_of(recipe, Machine())
    assert size is not None and size.vocabulary == 1024
    assert size.parameters == 8030261248 - 2 * (128256 - 1024) * 4096


@pytest.mark.parametrize(("name", "parts"), [("llama32_1b", 1), ("llama3_8b", 1)])
def test_the_trained_share_of_lora_is_that_of_its_matrices(name: str, parts: int) -> None:
    recipe = recipes.get(name).finetune_recipe(peft_scheme="lora")
    config, rank = recipe.model.config, recipe.peft.dim
    size = size_of(recipe, Machine())
    built = config.__fn_or_cls__(**config.__arguments__)
    h, ffn, heads, groups = built.hidden_size, built.ffn_hidden_size, built.num_attention_heads, built.num_query_groups
    wide = h + 2 * groups * h // heads
    layer = {"linear_qkv": h + wide, "linear_proj": 2 * h, "linear_fc1": h + 2 * ffn, "linear_fc2": ffn + h}
    assert size is not None and size.adapters == built.num_layers * rank * sum(layer[one] for one in layer)


@pytest.mark.parametrize(
    ("saved", "whole"), [("word_embeddings", 1), ("*embeddings,output_layer", 2), ("final_layernorm", None)]
)
def test_the_trained_share_has_the_modules_that_train_whole(saved: str, whole: int | None) -> None:
    """Norms aren't counted, and then no share is claimed."""
    recipe = recipes.get("llama3_8b").finetune_recipe(peft_scheme="lora")
    before = size_of(recipe, Machine())
    recipe.peft.modules_to_save = saved.split(",")
    size = size_of(recipe, Machine())
    assert before is not None and size is not None and before.saved == 0
    if whole is None:
        assert size.adapters is None
        return
    assert (size.adapters, size.saved) == (before.adapters, whole * size.vocabulary * 4096)
    assert size.adapters is not None
    assert f"({(size.adapters + size.saved) / size.parameters:.2%})" in str(size)
