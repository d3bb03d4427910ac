# SPDX-License-Identifier: Apache-2.0
"""Two models of experts in one process, the second one deeper."""

import small_runs

EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.01, "moe_ffn_hidden_size": 32}


def train_two() -> list[float]:
    losses = []
    for layers in (2, 3):
        model = small_runs.build_llama(num_layers=layers, **EXPERTS)
        losses += small_runs.fit(model, max_steps=1)["losses"]
    return losses


def test_a_deeper_model_trains_after_a_shallower_one(run_on_ranks) -> None:
    assert len(run_on_ranks(train_two, 1)[0]) == 2
