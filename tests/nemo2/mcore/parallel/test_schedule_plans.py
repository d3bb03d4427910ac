# SPDX-License-Identifier: Apache-2.0
"""Experts' exchanges beside another micro-batch's work: the same training, and a clear refusal of what can't be planned."""

from typing import Any

import pytest
import torch

from nemo2.base.errors import ConfigError
from support import small_runs, transformed_runs

EP2 = {"expert_model_parallel_size": 2}
PIPELINE = EP2 | {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}


def train(model: Any = None, *, strategy: dict[str, Any], **config: Any) -> dict[str, Any]:
    small_runs.release()
    experts = transformed_runs.EXPERTS | {"moe_aux_loss_coeff": 0.01} | config
    return small_runs.fit(
        small_runs.build_llama(**experts) if model is None else model(experts),
        max_steps=3,
        precision="bf16-mixed",
        **strategy,
    )


def with_and_without(strategy: dict[str, Any]) -> list[dict[str, Any]]:
    from nemo2.mcore.parallel import schedule_plans

    plans: list[Any] = []
    original = schedule_plans.schedule_plan

    def counted(*args: Any) -> Any:
        plans.append(original(*args))
        return plans[-1]

    schedule_plans.schedule_plan = counted
    runs = []
    for config in (
        {},
        {"overlap_moe_expert_parallel_comm": True},
        {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True},
    ):
        plans.clear()
        runs.append(train(strategy=strategy, **config) | {"plans": len(plans)})
    return runs


@pytest.mark.parametrize(
    "world, strategy", [pytest.param(2, EP2, id="ep 2"), pytest.param(4, PIPELINE, id="ep 2, pp 2, vp 2")]
)
def test_an_overlapped_exchange_trains_the_same(run_on_ranks, world: int, strategy: dict[str, Any]):
    plain, overlapped, delayed = run_on_ranks(with_and_without, world, strategy)[0]
    chunks = strategy.get("virtual_pipeline_model_parallel_size", 1)
    microbatches = (
        len(plain["losses"])
        * small_runs.GBS
        // small_runs.MBS
        // (world // strategy.get("pipeline_model_parallel_size", 1))
    )
    assert [plain["plans"], overlapped["plans"], delayed["plans"]] == [0, microbatches * chunks, microbatches * chunks]
    for run in (overlapped, delayed):
        assert (run["losses"], run["grad_norms"]) == (plain["losses"], plain["grad_norms"])


def refused_computation() -> str:
    from nemo2.models.llama import LlamaConfig, LlamaModel

    class Halved(LlamaModel):
        def training_step(self, batch: Any, batch_idx: int | None = None) -> torch.Tensor:
            return super().training_step(batch) / 2

    def model(config: dict[str, Any]) -> Any:
        plain = small_runs.build_llama()
        return Halved(LlamaConfig(**small_runs.MODEL | config), optim=plain.optim)

    with pytest.raises(ConfigError) as refused:
        train(model, strategy=EP2, overlap_moe_expert_parallel_comm=True)
    return str(refused.value)


def test_a_step_that_computes_on_the_output_is_refused(run_on_ranks):
    assert "overlap_moe_expert_parallel_comm" in run_on_ranks(refused_computation, 2)[0]
