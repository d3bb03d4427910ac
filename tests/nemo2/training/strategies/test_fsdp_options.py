# SPDX-License-Identifier: Apache-2.0
"""Settings that the sharding strategies refuse, before any process group exists, and settings that they leave alone."""

from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig

import nemo2 as nl
from nemo2.base.errors import ConfigError
from nemo2.mcore.parallel.fsdp import not_overlapped, told_of_split_rows, unshared
from nemo2.mcore.parallel.layout import Layout
from support import small_runs


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: nl.FSDP2Strategy(tensor_parallel_size=0),
            "tensor_parallel_size=0: must be a whole number of at least 1, or 'auto'",
        ),
        (lambda: nl.FSDP2Strategy(sequence_parallel=True), "Add torch's SequenceParallel to strategy.custom_tp_plan"),
        (lambda: nl.FSDP2Strategy(custom_tp_plan={"up": "colwise"}), "no effect with tensor_parallel_size=1"),
        (lambda: nl.FSDPStrategy(state_dict_type="full"), "state_dict_type='full': must be 'sharded'"),
        (lambda: nl.FSDPStrategy(sharding_strategy="FULL_SHART"), "did you mean 'FULL_SHARD'"),  # pyright: ignore
        (lambda: nl.MegatronStrategy(fsdp="pytorch"), "replace MegatronStrategy with FSDP2Strategy"),
        (
            lambda: nl.MegatronStrategy(fsdp="megatron", pipeline_model_parallel_size=2),
            "lays its mesh over tensor-, context- and data-parallel ranks only",
        ),
        (
            lambda: nl.MegatronStrategy(
                fsdp="megatron", ddp=DistributedDataParallelConfig(data_parallel_sharding_strategy="zero3")
            ),
            "must be one of optim, optim_grads, optim_grads_params",
        ),
    ],
)
def test_settings_that_cannot_work_say_what_to_do(make, words):
    with pytest.raises(ConfigError) as error:
        make()
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "of_fsdp"),
    [
        ("fsdp_double_buffer", True, True),
        ("data_parallel_sharding_strategy", "optim_grads", True),
        ("check_for_large_grads", True, False),
        ("align_param_gather", True, False),
    ],
)
def test_settings_of_other_gradient_buffers_are_said_to_have_no_effect(name, value, of_fsdp, caplog):
    def said(**strategy: Any) -> bool:
        caplog.clear()
        nl.MegatronStrategy(ddp=DistributedDataParallelConfig(**{name: value}), **strategy)
        return f"{name}={value!r} has no effect" in caplog.text

    assert (said(), said(fsdp="megatron")) == (of_fsdp, not of_fsdp)


def test_whole_gradients_are_not_overlapped_where_that_counts_them_twice(monkeypatch):
    assert "counts a rank's own gradients twice" in (not_overlapped("optim", "0.16.1") or "")
    assert not_overlapped("optim", "0.17.1") is not_overlapped("optim_grads", "0.16.1") is None

    def make(**fields: Any) -> Any:
        ddp = DistributedDataParallelConfig(data_parallel_sharding_strategy="optim", **fields)
        return nl.MegatronStrategy(fsdp="megatron", ddp=ddp)

    monkeypatch.setattr("nemo2.mcore.parallel.fsdp.not_overlapped", lambda sharding: "it is wrong here")
    with pytest.raises(
        ConfigError, match=r"overlap_grad_reduce=True .*'optim': it is wrong here\. Set overlap_grad_reduce=False"
    ):
        make(overlap_grad_reduce=True)
    make(overlap_grad_reduce=False)
    make()


def test_several_violations_come_together():
    with pytest.raises(ConfigError) as caught:
        nl.FSDP2Strategy(tensor_parallel_size=-1, context_parallel_size=0, sequence_parallel=True)
    assert caught.value.rules == ["sizes-are-counts", "sizes-are-counts", "strategy-settings-are-supported"]


def refusals() -> dict[str, str]:
    import torch

    from nemo2.mcore.precision import MegatronMixedPrecision
    from nemo2.training.trainer import Trainer

    small_runs.quiet()
    found = {}

    def attempt(name: str, strategy: Any, model: Any, **trainer: Any) -> None:
        try:
            Trainer(max_steps=1, devices=1, strategy=strategy, enable_progress_bar=False, **trainer).fit(model)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        assert not torch.distributed.is_initialized(), name

    attempt("data_parallel_size", nl.FSDP2Strategy(data_parallel_size=3), small_runs.build_llama())
    attempt("cp", nl.FSDP2Strategy(context_parallel_size=2), small_runs.build_llama())
    attempt("alone", nl.MegatronStrategy(fsdp="megatron"), small_runs.build_llama(distributed=True))
    attempt("clip", nl.FSDP2Strategy(), small_runs.build_llama(), gradient_clip_val=1.0)
    fp8 = MegatronMixedPrecision("bf16-mixed", fp8="hybrid")
    attempt("fp8", nl.FSDPStrategy(), small_runs.build_llama(), plugins=fp8)
    megatron = nl.MegatronStrategy(fsdp="megatron")
    attempt("scales", megatron, small_runs.build_llama(distributed=True), plugins=fp8)
    return found


def test_what_the_world_or_the_model_rules_out_is_said_before_any_group_exists(run_on_ranks):
    found = run_on_ranks(refusals, 1, init_process_group=False)[0]
    assert "data_parallel_size=3 contradicts the world: 1 rank " in found["data_parallel_size"]
    assert "does not divide the world of 1 rank" in found["cp"]
    assert "this layout has one data-parallel rank, so Megatron-FSDP has nothing to shard" in found["alone"]
    assert "optim.config.clip_grad=1.0" in found["clip"]
    assert "torch gathers parameters in 16 or 32 bits" in found["fp8"]
    assert "do not contain the history of scales" in found["scales"]


@pytest.mark.parametrize(
    ("layout", "world", "experts", "words"),
    [
        (
            Layout(),
            1,
            False,
            "on 1 rank (one rank): this layout has one data-parallel rank, so Megatron-FSDP has nothing to shard",
        ),
        (Layout(tp=2, sp=True), 2, False, "Leave strategy.fsdp unset, or run on 4 ranks (or another multiple of 2)."),
        (Layout(tp=2, sp=True), 4, True, None),
        (Layout(cp=2), 2, False, None),
        (Layout(ep=2), 2, True, "= 1 * 2 * 1 = 2 leaves one rank per expert. Megatron-FSDP has nothing to shard"),
        (
            Layout(ep=2),
            2,
            True,
            "Set strategy.expert_model_parallel_size=1, run on 4 ranks, or leave strategy.fsdp unset.",
        ),
        (Layout(cp=2, ep=4), 4, True, "Set strategy.expert_model_parallel_size=2, run on 8 ranks"),
        (Layout(ep=9), 9, True, "Set strategy.expert_model_parallel_size=3, run on 18 ranks"),
        (Layout(etp=2), 2, True, "= 2 * 1 * 1 = 2 leaves one rank per expert"),
        (Layout(ep=2), 4, True, None),
        (Layout(etp=2), 2, False, None),
    ],
)
def test_what_one_rank_alone_holds_is_not_left_to_megatron_fsdp(layout, world, experts, words):
    problem = unshared(layout, world, has_experts=experts)
    assert (problem is None) if words is None else (problem is not None and words in problem)


@pytest.mark.parametrize(
    ("layout", "world", "experts", "shards"),
    [
        (Layout(), 2, False, False),
        (Layout(), 4, False, True),
        (Layout(tp=2), 4, False, False),
        (Layout(ep=2), 4, True, False),
        (Layout(ep=2), 4, False, True),
    ],
)
def test_each_of_two_instances_has_ranks_to_shard_over(layout, world, experts, shards):
    """Losses of two ranks in two instances differed from those of one process by 3e-3 after a step, on Megatron-Core 0.19.2."""
    problem = unshared(layout, world, has_experts=experts, instances=2)
    assert shards if problem is None else not shards and "num_distributed_optimizer_instances=2" in problem


def test_a_recipe_changes_its_strategy_and_nothing_else():
    from nemo2 import llm

    recipe = llm.llama32_1b.pretrain_recipe()
    recipe.trainer.strategy = nl.Config(nl.FSDP2Strategy, context_parallel_size=2)
    assert recipe.strategy.context_parallel_size == 2
    assert recipe.strategy.data_parallel_size == "auto"


def test_a_parameter_that_megatron_fsdp_splits_inside_a_row_is_named_by_its_cause():
    with pytest.raises(ConfigError, match=r"'\[-1, 64\]' is invalid.* raise the method's dim"), told_of_split_rows():
        torch.zeros(96).view(-1, 64)
    with pytest.raises(RuntimeError, match="must match"), told_of_split_rows():
        torch.zeros(2) + torch.zeros(3)
