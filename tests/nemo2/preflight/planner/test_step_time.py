# SPDX-License-Identifier: Apache-2.0
"""Properties of predicted times that hold whatever the constants are."""

import math
from typing import Any

import pytest

from bench.planner.rows import decoder
from nemo2.base.errors import ConfigError
from nemo2.base.gpus import NAMES, gpu
from nemo2.models.shape import ModelShape
from nemo2.preflight.planner.constants import GUESSED, PRIORS, Share, calibrated, calibration
from nemo2.preflight.planner.error_band import band
from nemo2.preflight.planner.job import Job
from nemo2.preflight.planner.links import bandwidth, exchange_seconds
from nemo2.preflight.planner.step_time import predict
from nemo2.preflight.planner.text import band_words

LLAMA: dict[str, Any] = {
    "layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "head_dim": 128, "ffn": 28672, "vocab": 128256,
}  # fmt: skip
MIXED: dict[str, Any] = {
    "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "ffn": 14336, "vocab": 32000,
    "experts": 8, "topk": 2, "moe_ffn": 14336,
}  # fmt: skip
MIXERS: dict[str, Any] = {
    "hybrid_override_pattern": "M" * 80,
    "mamba_head_dim": 64,
    "mamba_state_dim": 128,
    "mamba_num_groups": 8,
}
LLAMA_70B, MIXTRAL = decoder(**LLAMA), decoder(**MIXED)


def job(**changes: Any) -> Job:
    asked = {
        "gpu": gpu("H100"),
        "gpus": 64,
        "seq": 8192,
        "global_batch": 128,
        "micro_batch": 1,
        "tp": 4,
        "pp": 4,
        "vp": 5,
    }
    return Job(**{**asked, **changes})


def seconds(shape: ModelShape = LLAMA_70B, **changes: Any) -> float:
    return predict(shape, job(**changes)).total


def test_parts_add_up_and_none_is_negative() -> None:
    for shape in (LLAMA_70B, MIXTRAL):
        step = predict(shape, job())
        assert math.isclose(sum(step.parts.values()), step.total)
        assert min(step.parts.values()) > 0


def test_no_gpu_is_faster_than_its_data_sheet() -> None:
    for name in NAMES:
        chip = gpu(name)
        speed = predict(LLAMA_70B, job(gpu=chip)).tokens_per_second_per_gpu
        assert 0.05 < LLAMA_70B.flops_per_token(8192) * speed / chip.flops["bf16"] < 0.95, name


def test_fewer_stages_micro_batches_or_chunks_change_the_bubble_as_the_schedule_does() -> None:
    def bubble(**changes: Any) -> float:
        step = predict(LLAMA_70B, job(**changes))
        work = sum(
            value for name, value in step.parts.items() if name in ("projections", "feed-forward", "core attention")
        )
        return step.parts["bubble"] / work

    # Idle over ideal is (pp - 1) / (vp m): Narayanan et al., arXiv 2104.04473, section 2.2.
    assert math.isclose(bubble() / bubble(vp=1), 1 / 5, rel_tol=0.01)
    assert math.isclose(bubble(global_batch=256) / bubble(), 1 / 2, rel_tol=0.01)


@pytest.mark.parametrize(
    "slower",
    [
        {"recompute": "full"},
        {"overlap_tp": False},
        {"overlap_grad": False, "overlap_param": False},
        {"sharding": "replicated"},
        {"network": 5e9},
        {"attention": "softmax"},
        {"compiled": False},
        {"gpu": gpu("A100")},
    ],
)
def test_what_takes_more_time_takes_more_time(slower: dict[str, Any]) -> None:
    assert seconds(**slower) > 1.002 * seconds()


def test_lower_precision_is_faster_but_not_by_its_rate() -> None:
    bf16, fp8 = seconds(), seconds(precision="fp8")
    assert bf16 / 2 < fp8 < bf16 / 1.1
    # fp4 on a GPU without it runs in 16 bits there, and is no faster.
    assert seconds(precision="fp4") > 0.9 * bf16


def test_cuda_graphs_help_where_the_host_is_slower_than_the_gpu() -> None:
    small = {"seq": 512, "tp": 1, "pp": 1, "vp": 1, "gpus": 8, "global_batch": 8, "gpu": gpu("B200")}
    shape = decoder(**LLAMA | {"hidden": 1024, "heads": 8, "kv_heads": 8, "ffn": 4096})
    assert seconds(shape, **small) > 1.5 * seconds(shape, cuda_graphs=True, **small)
    assert seconds() < 1.05 * seconds(cuda_graphs=True)


def test_links_within_a_machine_are_faster_than_between_machines() -> None:
    one = job()
    inside, across = bandwidth(one, 8, 1, GUESSED), bandwidth(one, 2, 8, GUESSED)
    assert inside == 450e9 * GUESSED.nvlink and across == 50e9 * GUESSED.network
    # Half of an all-to-all of 16 ranks stays in the machine, and the other half goes through the GPU's own adapter.
    reached = 50e9 * GUESSED.network * GUESSED.exchange
    assert math.isclose(exchange_seconds(one, 1e9, 16, 1, GUESSED), 0.5e9 / reached)


def test_tokens_that_travel_once_cross_the_network_once_per_machine() -> None:
    one, across = job(), 50e9 * GUESSED.network * GUESSED.exchange
    # Eight choices among 16 ranks of two machines: all but one in 256 tokens have one on the other machine.
    assert math.isclose(exchange_seconds(one, 1e9, 16, 1, GUESSED, choices=8), 1e9 * (1 - 1 / 2**8) / across)


def test_the_host_waits_for_the_sizes_of_experts_unless_they_are_fixed() -> None:
    shape = decoder(**MIXED | {"experts": 128, "topk": 8, "moe_ffn": 768, "hidden": 2048})
    one_node = {"tp": 1, "pp": 1, "vp": 1, "gpus": 8, "seq": 4096, "global_batch": 64, "ep": 8}
    asked = {**one_node, "gpu": gpu("B200"), "precision": "fp8"}
    waits = seconds(shape, **asked)
    assert waits > 1.02 * seconds(shape, capacity=True, **asked)
    # Graphs of attention and router leave it as it is; a graph of the whole step is what helps.
    assert seconds(shape, cuda_graphs=True, **asked) > 0.95 * waits
    assert waits > 1.4 * seconds(shape, cuda_graphs=True, graphed_experts=True, fused_experts=True, **asked)


def test_the_last_stage_has_fewer_layers_where_chunks_do_not_divide_them() -> None:
    odd, even = (decoder(**LLAMA | {"layers": layers, "vocab": 512000}) for layers in (78, 80))
    # Two layers fewer are the last stage's, whose output layer takes longer than that: every other stage is as full.
    tall = {"pp": 4, "vp": 1}
    fewer, more = predict(odd, job(**tall)), predict(even, job(**tall))
    spared = more.parts["projections"] - fewer.parts["projections"]
    assert math.isclose(spared / more.parts["projections"], 2 / 80, rel_tol=1e-6)
    assert fewer.total < more.total
    # Without room for it, the output layer is on top of a full stage.
    name = "output layer and uneven stages"
    assert fewer.parts[name] < more.parts[name]
    one_stage = predict(even, job(pp=1, vp=1, gpus=16))
    assert math.isclose(more.parts[name], one_stage.parts[name])


def test_the_optimizers_share_of_experts_is_the_same_however_they_are_split() -> None:
    # Twice the expert-parallel ranks hold half of the experts each, with half of the copies to share the states.
    seconds = {predict(MIXTRAL, job(ep=ep, vp=1)).parts["optimizer"] for ep in (1, 2, 4)}
    assert max(seconds) == pytest.approx(min(seconds)) and max(seconds) > 0


def test_unknown_gpus_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="H100"):
        gpu("H1000")


def test_calibrated_constants_are_all_there_and_within_what_their_guesses_allow() -> None:
    values = calibration()["constants"]
    assert list(values) == list(PRIORS)
    for name, prior in PRIORS.items():
        assert prior.value / prior.spread**4 < values[name] < prior.value * prior.spread**4, name
        assert not isinstance(prior, Share) or values[name] < 1, name
    assert calibrated().gemm["hopper"] == values["gemm.hopper"]


def test_the_band_of_a_job_that_nobody_measured_is_the_widest() -> None:
    errors = {"dense, 16 bits": [0.9, 1.1, 100], "experts, 16 bits": [0.8, 1.3, 50], "hybrid, 16 bits": [1.2, 1.9, 3]}
    known, unknown = band(LLAMA_70B, job(), errors), band(LLAMA_70B, job(precision="fp8"), errors)
    assert tuple(known) == (0.9, 1.1, "dense, 16 bits", 100)
    assert (unknown.low, unknown.high, unknown.measurements) == (0.8, 1.3, 0)
    # Three measurements are no band.
    few = band(decoder(**LLAMA, **MIXERS), job(), errors)
    assert (few.low, few.high, few.measurements) == (0.8, 1.3, 3)


def test_the_words_of_a_band_count_only_measurements_that_made_the_band() -> None:
    errors = {"dense, 16 bits": [0.9, 1.1, 100], "hybrid, 16 bits": [1.2, 1.9, 3]}
    assert band_words(band(LLAMA_70B, job(), errors)).startswith("two thirds of 100 published speeds")
    few = band_words(band(decoder(**LLAMA, **MIXERS), job(), errors))
    assert "two thirds" not in few and "the widest band" in few and "only 3 speeds" in few
    assert "no speeds" in band_words(band(LLAMA_70B, job(precision="fp8"), errors))


def test_a_band_has_its_prediction_within() -> None:
    assert tuple(band(LLAMA_70B, job(), {"dense, 16 bits": [1.1, 1.3, 30]}))[:2] == (1.0, 1.3)
