# SPDX-License-Identifier: Apache-2.0
"""The memory formula against figures that were published or follow from the papers it is from."""

import math
from typing import Any

from bench.planner.rows import decoder
from nemo2.base.gpus import gpu
from nemo2.preflight.planner.job import Job
from nemo2.preflight.planner.memory import in_flight, layer_activations, predict_memory

GPT = decoder(
    layers=96, hidden=12288, heads=96, kv_heads=96, head_dim=128, ffn=4 * 12288, vocab=51200, gated=False, tied=True
)
LLAMA: dict[str, Any] = {
    "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "ffn": 14336, "vocab": 128256,
}  # fmt: skip
LLAMA_8B = decoder(**LLAMA)


def job(**changes: Any) -> Job:
    asked = {"gpu": gpu("H100"), "gpus": 64, "seq": 2048, "global_batch": 512, "micro_batch": 1, "tp": 8, "pp": 8}
    return Job(**{**asked, **changes})


def test_activations_of_a_layer_are_those_of_korthikanti() -> None:
    """Table 2 of arXiv 2205.05198, in bytes of sequence x batch x hidden; its dropout of the scores is in the third."""
    unit = 2048 * 12288

    def layer(**changes: Any) -> float:
        return layer_activations(GPT, job(dropout=True, **changes)) / unit

    t, scores = 8, 5 * 96 * 2048 / 12288
    assert math.isclose(layer(), 34 / t, rel_tol=0.001)
    assert math.isclose(layer(sp=False), 10 + 24 / t, rel_tol=0.001)
    assert math.isclose(layer(attention="softmax"), (34 + scores) / t, rel_tol=0.001)
    assert math.isclose(layer(attention="softmax", recompute="selective"), 34 / t, rel_tol=0.001)


def test_states_are_as_many_bytes_a_weight_as_megatrons_document_says() -> None:
    """docs/user-guide/features/dist_optimizer.md: 18 replicated, 6 + 12 / d with the distributed optimizer."""
    weights = LLAMA_8B.parameters

    def state(**changes: Any) -> float:
        parts = predict_memory(LLAMA_8B, job(tp=1, pp=1, gpus=8, **changes)).parts
        return sum(parts[name] for name in ("weights", "gradients", "optimizer")) / weights

    assert math.isclose(state(sharding="replicated"), 18.0)
    assert math.isclose(state(), 6 + 12 / 8)
    assert math.isclose(state(grad_bytes=2), 4 + 12 / 8)
    assert math.isclose(state(sharding="fsdp"), 18 / 8)


def test_the_first_stage_keeps_as_many_micro_batches_as_the_schedule_has_in_flight() -> None:
    assert in_flight(job(), 0) == 8 and in_flight(job(), 7) == 1
    # Interleaving keeps 1 + (pp - 1) / (pp vp) times as much (arXiv 2205.05198, section 4.2.3).
    assert math.isclose(in_flight(job(vp=4), 0) / in_flight(job(), 0), 1 + 7 / (8 * 4))
    assert in_flight(job(global_batch=2), 0) == 2


def test_recomputation_trades_activations_for_block_inputs() -> None:
    def kept(**changes: Any) -> float:
        return predict_memory(LLAMA_8B, job(tp=1, pp=1, gpus=8, **changes)).parts["activations"]

    assert kept(recompute="full") < 0.15 * kept()
    assert kept(recompute="full") < kept(recompute="selective", recomputed=("mlp",)) < kept()


def test_logits_of_a_whole_vocabulary_on_every_rank_count_whole() -> None:
    def logits(**changes: Any) -> float:
        return predict_memory(LLAMA_8B, job(pp=1, gpus=8, **changes)).parts["logits"]

    assert logits(torch_loss=True) > 8 * logits()


def test_experts_are_shared_by_fewer_ranks_than_dense_layers() -> None:
    experts = decoder(**LLAMA, experts=8, topk=2, moe_ffn=14336)
    asked = {"tp": 1, "pp": 1, "gpus": 64, "ep": 8}
    whole = predict_memory(experts, job(**asked)).parts
    attention, router, norms = 4096 * (4096 + 2 * 1024) + 4096 * 4096, 4096 * 8, 2 * 4096
    dense = 32 * (attention + router + norms) + 4096 + 2 * 128256 * 4096
    routed = 32 * 3 * 4096 * 14336  # one of the eight
    assert math.isclose(whole["weights"], 2 * (dense + routed))
    assert math.isclose(whole["optimizer"], 12 * (dense / 64 + routed / 8))
