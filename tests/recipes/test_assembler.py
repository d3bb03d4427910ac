# SPDX-License-Identifier: Apache-2.0
"""From facts to factories: NeMo's arguments, variants, and what is refused."""

from pathlib import Path
from typing import Any

import fiddle as fdl
import pytest
import torch

from nemo2 import ModelCheckpoint, llm, recipes
from nemo2.base.errors import ConfigError
from nemo2.callbacks import TimingCallback
from nemo2.config import who_set
from nemo2.recipes import llama3_8b, llama32_1b
from nemo2.recipes._assembler import Layout


def test_trainer_takes_the_facts_unless_told_otherwise():
    stated, asked = llama3_8b.trainer(), llama3_8b.trainer(
        tensor_parallelism=4,
        pipeline_parallelism=2,
        pipeline_parallelism_type=torch.bfloat16,
        virtual_pipeline_parallelism=2,
        context_parallelism=1,
        sequence_parallelism=True,
        num_nodes=3,
        num_gpus_per_node=16,
        max_steps=7,
        callbacks=[],
    )  # fmt: skip
    assert stated.strategy.context_parallel_size == 2
    assert (stated.num_nodes, stated.devices, stated.max_steps) == (1, 8, 1_168_251)
    strategy = asked.strategy
    assert (strategy.tensor_model_parallel_size, strategy.pipeline_model_parallel_size) == (4, 2)
    assert (strategy.virtual_pipeline_model_parallel_size, strategy.context_parallel_size) == (2, 1)
    assert (strategy.sequence_parallel, strategy.pipeline_dtype) == (True, torch.bfloat16)
    assert (asked.num_nodes, asked.devices, asked.max_steps, asked.callbacks) == (3, 16, 7, [])


def test_nemos_own_arguments_of_some_factories():
    assert llm.mixtral_8x7b.trainer(expert_parallelism=2).strategy.expert_model_parallel_size == 2
    with pytest.raises(ConfigError, match="two names of the same size"):
        llm.mixtral_8x7b.trainer(expert_parallelism=2, expert_model_parallelism=2)
    experts = llm.llama4_e16.trainer(expert_tensor_parallelism=2, expert_model_parallelism=8).strategy
    assert (experts.expert_tensor_parallel_size, experts.expert_model_parallel_size) == (2, 8)
    hybrid = llm.nemotronh_8b.trainer(dir="/there", save_top_k=3, ckpt_async_save=True, val_check_interval=7)
    saves = hybrid.callbacks[-1]
    assert hybrid.strategy.ckpt_async_save is True
    assert (saves.dirpath, saves.save_top_k, saves.every_n_train_steps) == ("/there", 3, 7)
    assert isinstance(saves, ModelCheckpoint) and not any(
        isinstance(one, ModelCheckpoint) for one in llm.nemotronh_8b.trainer().callbacks
    )
    assert llm.gemma3_1b.model(seq_length=512).config.seq_length == 512
    assert llm.starcoder_15b.starcoder_trainer(precision="16-mixed").plugins.precision == "16-mixed"
    with pytest.raises(ConfigError, match="precision='bf61': must be one of 'bf16-mixed'"):
        llm.starcoder_15b.starcoder_trainer(precision="bf61")


def test_a_trainer_alone_is_timed_where_nemos_is():
    timed = {name for name in recipes.names() if getattr(recipes, name).trainer().callbacks}
    long, hybrids = (
        {"llama3_70b_64k", "mixtral_8x7b_16k", "mixtral_8x7b_64k"},
        ("nemotronh", "nemotron_nano", "nemotron3_nano"),
    )
    assert timed == long | {name for name in recipes.names() if name.startswith(hybrids)}
    assert all(isinstance(getattr(recipes, name).trainer().callbacks[0], TimingCallback) for name in timed)


def test_what_is_asked_for_is_returned_even_where_it_cannot_run():
    recipe = llama3_8b.pretrain_recipe(num_nodes=1, num_gpus_per_node=3)
    assert (recipe.trainer.devices, recipe.strategy.context_parallel_size) == (3, 2)


def test_another_function_may_be_called_with_the_recipe():
    recipe = llama32_1b.pretrain_recipe(fn=llm.validate)
    assert fdl.get_callable(recipe) is llm.validate


def test_a_variant_names_its_parent_and_what_differs():
    variant = llama3_8b.RECIPE.but(
        name="llama3_8b_16k", seq_length=16384, nodes=2, layout=Layout(tp=4, pp=2, cp=2, sp=True)
    )
    recipe = variant.pretrain_recipe()
    assert (recipe.data.seq_length, recipe.trainer.num_nodes, recipe.strategy.tensor_model_parallel_size) == (
        16384,
        2,
        4,
    )
    assert llama3_8b.RECIPE.seq_length == 8192


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sequence_length": 4096}, "no fact 'sequence_length'; did you mean 'seq_length'"),
        ({"layout": Layout(tp=16)}, "does not divide the world of 8"),
        ({"layout": 4}, r"llama3_8b.layout=4: must be a Layout, such as Layout\(tp=2\)"),
        ({"nodes": 0, "micro_batch_size": "1"}, r"micro_batch_size='1': must be a whole number[^\0]*llama3_8b.nodes=0"),
        ({"max_lr": "1e-3"}, "llama3_8b.max_lr='1e-3': must be a number"),
        ({"global_batch_size": 510}, r"global_batch_size=510 must be a multiple of .* = 4"),
        ({"seq_length": 8190}, r"seq_length=8190 must be a multiple of 2 \* context_parallel_size = 4"),
    ],
)
def test_facts_that_cannot_be_are_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        llama3_8b.RECIPE.but(**changes)


@pytest.mark.parametrize(
    ("recipe", "factory", "typed", "meant"),
    [
        ("llama3_8b", "pretrain_recipe", "num_gpu_per_node", "num_gpus_per_node"),
        ("llama3_8b", "pretrain_recipe", "num_node", "num_nodes"),
        ("llama3_8b", "finetune_recipe", "peft_schema", "peft_scheme"),
        ("llama3_8b", "trainer", "max_step", "max_steps"),
        ("llama3_8b", "model", "seq_len", "seq_length"),
        ("deepseek_v3", "pretrain_recipe", "num_node", "num_nodes"),
    ],
)
def test_an_unknown_argument_of_a_factory_is_answered_with_the_nearest(recipe, factory, typed, meant):
    with pytest.raises(TypeError, match=f"has no parameter '{typed}'; did you mean '{meant}'"):
        getattr(recipes.get(recipe), factory)(**{typed: 1})


def test_an_unknown_recipe_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="no recipe 'llama3-8b'; did you mean 'llama3_8b'"):
        recipes.get("llama3-8b")
    with pytest.raises(AttributeError, match="did you mean 'llama3_8b'"):
        llm.lama3_8b  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_two_recipes_share_nothing_that_can_be_edited():
    first, second = llama3_8b.pretrain_recipe(), llama3_8b.pretrain_recipe()
    first.trainer.callbacks.append("edited")
    first.strategy.ddp_config.bucket_size = 3
    assert second == llama3_8b.pretrain_recipe()


def test_a_fact_is_remembered_as_set_where_it_is_written():
    recipe: Any = llama3_8b.pretrain_recipe()
    lines = Path(llama3_8b.__file__).read_text().splitlines()
    for node, name in ((recipe.data, "seq_length"), (recipe.strategy, "context_parallel_size")):
        ((file, line, _),) = who_set(node, name)
        assert Path(file).name == "llama3_8b.py" and lines[line - 1].startswith("RECIPE = llama3(")
    variant: Any = llama3_8b.RECIPE.but(seq_length=4096).pretrain_recipe()
    assert Path(who_set(variant.data, "seq_length")[0][0]).name == Path(__file__).name
    assert Path(who_set(recipe.trainer, "val_check_interval")[0][0]).name == "_assembler.py"
