# SPDX-License-Identifier: Apache-2.0
"""The job that the planner reads off a recipe, against the model's own counts and against what its rehearsal really does."""

import math
from typing import Any

import pytest

from nemo2 import recipes
from nemo2.base.errors import ConfigError
from nemo2.base.gpus import gpu
from nemo2.config import Config, apply_overrides
from nemo2.mcore.settle import Machine, on
from nemo2.preflight.planner.constants import calibrated
from nemo2.preflight.planner.layer_time import layers_time
from nemo2.preflight.planner.memory import layer_activations, predict_memory
from nemo2.preflight.planner.plan import plan
from nemo2.preflight.planner.recipe import Subject, read_recipe


def subject(name: str, *changes: str, gpus: int | None = None, performance: bool = False) -> Subject:
    recipe = recipes.get(name).pretrain_recipe(performance_mode=performance)
    apply_overrides(recipe, list(changes))
    return read_recipe(on(recipe, Machine(count=gpus)), gpu("H100"))


def test_linear_attention_gains_on_full_attention_with_the_length() -> None:
    def seconds(length: int, *changes: str) -> float:
        job = subject("qwen35_9b", f"data.seq_length={length}", *changes)
        return sum(layers_time(job.shape, job.job, calibrated()).values())

    full = "model.config.experimental_attention_variant=null"
    gains = [seconds(length, full) / seconds(length) for length in (4096, 65536)]
    assert gains[1] > gains[0]


def test_how_tokens_reach_their_experts_is_the_models() -> None:
    def dispatched(*changes: str) -> tuple[str, bool, bool, bool]:
        job = subject("mixtral_8x7b", *changes).job
        return job.dispatch, job.capacity, job.graphed_experts, job.overlap_ep

    assert dispatched() == ("alltoall", False, False, False)
    padded = "model.config.moe_pad_expert_input_to_capacity=True", "model.config.moe_expert_capacity_factor=1.0"
    assert dispatched(*padded) == ("alltoall", True, False, False)
    assert dispatched("model.config.moe_token_dispatcher_type=flex")[0] == "once"
    assert dispatched("model.config.cuda_graph_impl=full_iteration")[2] is True
    assert dispatched("model.config.cuda_graph_impl=transformer_engine")[2] is False


def test_graphs_are_read_though_this_machine_turns_them_off() -> None:
    assert not subject("llama3_8b").job.cuda_graphs
    for kind in ("local", "transformer_engine", "full_iteration"):
        assert subject("llama3_8b", f"model.config.cuda_graph_impl={kind}").job.cuda_graphs


def test_the_job_is_the_one_that_the_run_would_settle() -> None:
    job = subject(
        "llama3_70b",
        "trainer.plugins.fp8=hybrid",
        "model.config.recompute_granularity=selective",
        'model.config.recompute_modules=["mlp"]',
        gpus=128,
        performance=True,
    ).job
    assert (job.gpus, job.tp, job.pp, job.vp, job.cp, job.dp) == (128, 4, 4, 5, 2, 4)
    assert job.precision == "fp8" and job.sharding == "zero1" and job.sp
    assert job.recomputes("mlp") and not job.recomputes("core_attn")
    assert job.overlap_tp and job.overlap_pp and job.overlap_grad and job.overlap_param
    short = subject("llama3_8b", "trainer.plugins=None", "trainer.precision=bf16-mixed").job
    assert short == subject("llama3_8b").job


def test_overlap_that_the_user_turned_off_is_off() -> None:
    job = subject("llama3_8b", "strategy.ddp.overlap_grad_reduce=False", "strategy.ddp.overlap_param_gather=False").job
    assert not job.overlap_grad and not job.overlap_param


def test_a_strategy_that_shards_everything_is_planned_by_formula() -> None:
    import nemo2 as nl

    recipe: Any = recipes.get("llama3_8b").pretrain_recipe()
    recipe.trainer.strategy = Config(nl.FSDP2Strategy)
    made = plan(recipe, gpus="H100x16", tokens=1e9)
    assert (made.job.sharding, made.job.dp, bool(made.fit.why)) == ("fsdp", 16, True)
    assert made.step.parts["sharded weights"] > 0 and made.fits
    assert made.layout == "FSDP 16"


def test_scores_that_are_capped_are_kept() -> None:
    assert subject("gemma2_9b").job.keeps_scores and not subject("llama_tiny").job.keeps_scores


def test_a_vocabulary_that_only_a_file_knows_is_asked_for() -> None:
    recipe: Any = recipes.get("llama3_8b").pretrain_recipe()
    recipe.model.config.vocab_size = None
    from nemo2.data.tokenizer import AutoTokenizer

    recipe.data.tokenizer = Config(AutoTokenizer, "somewhere/else")
    with pytest.raises(ConfigError, match="set model.config.vocab_size"):
        read_recipe(recipe, gpu("H100"))


def test_gpus_that_are_no_whole_nodes_are_refused() -> None:
    with pytest.raises(ConfigError, match="not whole nodes of 8"):
        on(recipes.get("llama3_8b").pretrain_recipe(), Machine(count=12))


FULL = ("model.config.recompute_granularity=full", "model.config.recompute_method=block")


def test_blocks_trade_time_for_memory_layer_by_layer() -> None:
    """They answered alike for 1, 8 and 32 of 32 layers."""
    from nemo2.preflight.planner.step_time import predict

    found = [subject("llama3_8b", *FULL, f"model.config.recompute_num_layers={count}") for count in (1, 8, 32)] + [
        subject("llama3_8b", FULL[0], "model.config.recompute_method=uniform", "model.config.recompute_num_layers=1")
    ]
    again = [predict(one.shape, one.job).parts["recomputation"] for one in found]
    kept = [predict_memory(one.shape, one.job).parts["activations"] for one in found]
    assert math.isclose(again[1], 8 * again[0]) and math.isclose(again[2], 32 * again[0])
    assert kept[0] > 1.2 * kept[1] > 3 * kept[2]
    # All of 32 are what uniform groups of one are.
    assert math.isclose(again[3], again[2]) and math.isclose(kept[3], kept[2])


def test_groups_keep_fewer_inputs_and_are_whole_longer() -> None:
    uniform = (FULL[0], "model.config.recompute_method=uniform")
    one, four = (subject("llama3_8b", *uniform, f"model.config.recompute_num_layers={count}") for count in (1, 4))
    kept = [predict_memory(each.shape, each.job).parts["activations"] for each in (one, four)]
    inputs = 2 * one.job.tokens * one.shape.hidden / one.job.sequence_ranks
    assert math.isclose(kept[1] - kept[0], 3 * layer_activations(one.shape, one.job) - (32 - 8) * inputs)


def test_offloaded_activations_are_not_counted_on_the_gpu_and_their_copies_are_told() -> None:
    from nemo2.preflight.planner.text import render

    changes = (
        "strategy.context_parallel_size=1",
        "model.config.cpu_offloading=True",
        "model.config.cpu_offloading_num_layers=24",
    )
    away, here = subject("llama3_8b", *changes), subject("llama3_8b", changes[0])
    kept = [predict_memory(each.shape, each.job).parts["activations"] for each in (here, away)]
    assert math.isclose(kept[0] - kept[1], 23 * layer_activations(here.shape, here.job))
    recipe = recipes.get("llama3_8b").pretrain_recipe()
    apply_overrides(recipe, [*changes, "model.config.cpu_offloading_weights=True"])
    made = plan(recipe, gpus="H100", check=False)
    assert made.fit.why and len(made.notes) == 2
    assert "note: model.config.cpu_offloading: the activations of 24 layers" in render(made)
    assert not plan(here.facts.recipe, gpus="H100", check=False).notes
