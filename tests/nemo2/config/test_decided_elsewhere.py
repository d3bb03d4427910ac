# SPDX-License-Identifier: Apache-2.0
"""A field that another part of the recipe decides reads as what runs."""

import copy
import dataclasses
import pickle
from functools import reduce
from operator import attrgetter
from typing import Any

import fiddle as fdl
import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig

from nemo2 import llm, recipes
from nemo2.config import Config, flatten
from nemo2.mcore.settle import Machine, settle
from nemo2.recipes import llama3_8b, llama3_8b_16k, llama_tiny
from nemo2.recipes.precision import mixed_precision
from support import small_runs
from support.nightly import each_case

PLUGINS = ("bf16_mixed", "fp16_mixed", "fp32")


def run_with_each_plugin() -> dict[str, bool]:
    """Settings of the live strategy, after training."""
    return {
        name: small_runs.fit(
            small_runs.build_llama(),
            max_steps=1,
            precision=fdl.build(getattr(mixed_precision, name)()),
            inspect=lambda trainer: trainer.strategy.ddp_config.grad_reduce_in_fp32,
        )["inspected"]
        for name in PLUGINS
    }


@pytest.mark.quick
def test_the_tree_says_what_a_run_does(run_on_ranks: Any) -> None:
    [ran] = run_on_ranks(run_with_each_plugin, 1)
    recipe = llama_tiny.pretrain_recipe()
    for name in PLUGINS:
        recipe.trainer.plugins = getattr(mixed_precision, name)()
        assert recipe.strategy.ddp_config.grad_reduce_in_fp32 is ran[name], name
    assert len(set(ran.values())) == 2


def test_copies_follow_their_own_precision_and_what_is_set_stays() -> None:
    recipe = llama3_8b.pretrain_recipe()
    before = flatten(recipe)
    kept = recipe.strategy.ddp_config
    assert kept.grad_reduce_in_fp32 is True
    other = copy.deepcopy(recipe)
    other.trainer.plugins.grad_reduce_in_fp32 = False
    assert (recipe.strategy.ddp.grad_reduce_in_fp32, other.strategy.ddp.grad_reduce_in_fp32) == (True, False)
    assert pickle.loads(pickle.dumps(other)).trainer.strategy.ddp.grad_reduce_in_fp32 is False
    assert flatten(recipe) == before, "reading sets nothing"
    recipe.strategy.ddp.grad_reduce_in_fp32 = False
    assert kept.grad_reduce_in_fp32 is False


@pytest.mark.parametrize(("plugin", "dtype"), [("bf16_mixed", torch.bfloat16), ("fp16_mixed", torch.float16)])
def test_unset_dtypes_and_lengths_read_as_what_runs_and_an_explicit_none_is_unset(plugin: str, dtype: Any) -> None:
    recipe = llama3_8b_16k.pretrain_recipe()
    recipe.trainer.plugins = getattr(mixed_precision, plugin)()
    assert recipe.trainer.strategy.__arguments__["pipeline_dtype"] is None, "the recipe's factory says so"
    for name in ("params_dtype", "pipeline_dtype", "autocast_dtype"):
        recipe.trainer.plugins.__arguments__.pop(name, None)
    settled = settle(recipe, Machine(model="h100", transformer_engine="2.8"))
    assert recipe.trainer.strategy.pipeline_dtype is recipe.trainer.plugins.pipeline_dtype is dtype
    assert recipe.trainer.plugins.params_dtype is settled.objects["model.config"].params_dtype is dtype
    assert recipe.model.config.seq_length == recipe.data.seq_length == 16_384
    recipe.data.seq_length = 4096
    assert recipe.model.config.seq_length == 4096 and "seq_length" not in recipe.model.config.__arguments__
    recipe.trainer.strategy.pipeline_dtype = torch.float32
    assert recipe.trainer.strategy.pipeline_dtype is torch.float32


@pytest.mark.parametrize("plugins", [None, []])
def test_without_a_precision_it_is_the_class_default(plugins: Any) -> None:
    recipe = llama_tiny.pretrain_recipe()
    recipe.trainer.plugins = plugins
    default = DistributedDataParallelConfig().grad_reduce_in_fp32
    assert recipe.strategy.ddp_config.grad_reduce_in_fp32 is default
    assert Config(DistributedDataParallelConfig).grad_reduce_in_fp32 is default


DECIDED = ("trainer.plugins", "strategy.", "optim.config", "fp16's loss scaler", "strategy.ddp_config")
"""How settling says that another part of the recipe decided."""


UNSHARDED = {"strategy.ddp.overlap_param_gather": False}


@pytest.mark.parametrize(
    ("plugin", "changes"),
    [
        ("bf16_mixed", {}),
        ("fp16_mixed", {"strategy.tensor_model_parallel_size": 2, "strategy.sequence_parallel": True}),
        ("fp32", {"strategy.tensor_model_parallel_size": 4}),
        ("bf16_with_fp8_mixed", {"strategy.pipeline_model_parallel_size": 2}),
        ("bf16_with_fp8_current_scaling_mixed", {"optim.config.use_distributed_optimizer": False, **UNSHARDED}),
        ("fp16_with_mxfp8_mixed", {"strategy.virtual_pipeline_model_parallel_size": 4}),
    ],
)
def test_every_field_that_another_part_decides_reads_as_what_runs(plugin: str, changes: dict[str, Any]) -> None:
    recipe = llama3_8b.pretrain_recipe()
    recipe.trainer.plugins = getattr(mixed_precision, plugin)()
    for path, value in changes.items():
        *parents, name = path.split(".")
        setattr(reduce(getattr, parents, recipe), name, value)
    settled = settle(recipe, Machine(model="b200", transformer_engine="2.20"))
    seen = set()
    for path, node in (
        ("trainer.strategy", recipe.strategy),
        ("trainer.strategy.ddp", recipe.strategy.ddp),
        ("optim.config", recipe.optim.config),
        ("model.config", recipe.model.config),
    ):
        for field in dataclasses.fields(settled.objects[path]):
            steps = settled.steps(path, field.name)
            decides = next((step.why for step in steps if step.why.startswith(DECIDED)), None)
            # The first is Megatron-Core's own default, which settling writes out; two parts decide the second.
            if decides is None or field.name in ("microbatch_group_size_per_vp_stage", "pipeline_dtype"):
                continue
            if field.name in node.__arguments__:  # set, and changed with a word at the start
                continue
            seen.add(field.name)
            assert getattr(node, field.name) == getattr(settled.objects[path], field.name), f"{path}.{field.name}"
    assert {"params_dtype", "fp8_recipe"} & seen and not settled.messages


MODULES = [recipes.get(name) for name in recipes.names()]


@pytest.mark.parametrize("module", each_case(MODULES), ids=lambda module: module.__name__.rpartition(".")[2])
def test_a_trainer_made_alone_reads_as_in_the_recipe(module: Any) -> None:
    alone, whole = module.trainer(), module.pretrain_recipe().trainer
    for path in ("strategy.pipeline_dtype", "strategy.ddp.grad_reduce_in_fp32", "strategy.ddp.check_for_nan_in_grad"):
        read = [reduce(getattr, path.split("."), trainer) for trainer in (alone, whole)]
        assert read[0] == read[1], path


def test_a_precision_made_alone_has_its_dtypes() -> None:
    plugin: Any = mixed_precision.bf16_mixed()
    built = fdl.build(plugin).dtype_config
    for name in ("params_dtype", "pipeline_dtype", "autocast_dtype"):
        assert getattr(plugin, name) is getattr(built, name) is torch.bfloat16


def test_a_part_reads_the_same_after_the_recipe_that_it_was_read_from_is_gone() -> None:
    recipe, trainer = llm.llama3_70b.pretrain_recipe(), llm.llama3_70b.trainer()
    for name in ("pipeline_dtype", "ddp.grad_reduce_in_fp32"):
        kept = attrgetter(name)
        values = {
            str(kept(strategy))
            for strategy in (
                recipe.trainer.strategy,
                trainer.strategy,
                llm.llama3_70b.trainer().strategy,
                llm.llama3_70b.pretrain_recipe().strategy,
            )
        }
        assert values == {"torch.bfloat16" if name == "pipeline_dtype" else "True"}
