# SPDX-License-Identifier: Apache-2.0
"""Jobs drawn at random, of every kind and far from what anybody published: no time is impossible, and what helps helps."""

import dataclasses
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest

from bench.planner.rows import decoder, shapes
from nemo2.base.gpus import NAMES, gpu
from nemo2.models.parts import Attention
from nemo2.models.shape import ModelShape
from nemo2.preflight.planner.error_band import band
from nemo2.preflight.planner.job import Job
from nemo2.preflight.planner.layer_time import seen
from nemo2.preflight.planner.memory import predict_memory
from nemo2.preflight.planner.step_time import predict

PUBLISHED = shapes()
SHAPES = {
    "tiny": decoder(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=256, vocab=1000),
    "8b": PUBLISHED["llama3-8b"],
    "405b": PUBLISHED["llama3.1-405b"],
    "windows": decoder(
        layers=42, hidden=3584, heads=16, kv_heads=8, head_dim=256, ffn=14336, vocab=256000, tied=True,
        window_size=(4095, 0), window_attn_skip_freq=2,
    ),
    "few experts": PUBLISHED["mixtral-8x7b"],
    "one choice": PUBLISHED["llama4-maverick-400b-e128"],
    "latent attention": PUBLISHED["deepseek-v3"],
    "hybrid": PUBLISHED["nemotron3-nano-30b-a3b"],
    "mixers alone": decoder(
        layers=56, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=0, vocab=256000,
        hybrid_override_pattern="M" * 56, mamba_head_dim=64, mamba_state_dim=128, mamba_num_groups=8,
    ),
}  # fmt: skip
PARTS = (("core_attn",), ("mlp",), ("moe",), ("moe_act", "layernorm"), ("mla_up_proj",))
HELPS = (
    "overlap_grad",
    "overlap_param",
    "overlap_tp",
    "overlap_pp",
    "overlap_ep",
    "cuda_graphs",
    "graphed_experts",
    "fused_experts",
    "capacity",
    "compiled",
    "low_attention",
)


def drawn(shape: ModelShape, rng: random.Random) -> Job:
    """Anything from one GPU to 16,384, tensor-parallel over machines too, experts over as many ranks as divide."""
    sizes = {"tp": (1, 1, 2, 4, 8, 16, 64), "pp": (1, 1, 2, 4, 16), "cp": (1, 1, 2, 16), "dp": (1, 1, 2, 3, 8, 64, 512)}
    tp, pp, cp, dp = (rng.choice(sizes[name]) for name in sizes)
    if tp * pp * cp * dp > 16384:
        return drawn(shape, rng)
    ranks = tp * cp * dp
    ep = etp = 1
    if shape.experts:
        ep = rng.choice([size for size in (1, 2, 8, 16, 64, 128) if shape.experts % size == ranks % size == 0])
        etp = rng.choice([size for size in (1, 2, 8) if ranks % (ep * size) == 0 and size <= tp])
    micro, micro_batches = rng.choice((1, 2, 8)), rng.choice((1, 2, 8, 64, 1024))
    return Job(
        gpu=gpu(rng.choice(NAMES)),
        gpus=ranks * pp,
        seq=rng.choice((2048, 4096, 32768, 131072)),
        global_batch=dp * micro * micro_batches,
        micro_batch=micro,
        precision=rng.choice(("fp32", "bf16", "fp8", "fp4")),
        tp=tp,
        pp=pp,
        vp=rng.choice((1, 2, 4)) if pp > 1 else 1,
        cp=cp,
        ep=ep,
        etp=etp,
        sp=rng.random() < 0.7,
        sharding=rng.choice(("replicated", "zero1", "fsdp")),
        recompute=rng.choice(("none", "selective", "full")),
        recomputed=rng.choice(PARTS),
        attention=rng.choice(("flash", "flash", "flash2", "flash1", "softmax", "eager")),
        dispatch=rng.choice(("alltoall", "once")),
        torch_loss=rng.random() < 0.2,
        dropout=rng.random() < 0.2,
        document=rng.choice((None, None, 250)),
        lora=rng.random() < 0.1,
        network=rng.choice((None, None, 1e9, 100e9)),
        **{name: rng.random() < 0.4 for name in HELPS},
    )


def faster_ways(job: Job) -> Iterator[tuple[str, Job]]:
    """The same job with something better."""
    chip = job.gpu
    for name in HELPS:
        yield name, dataclasses.replace(job, **{name: True})
    better: dict[str, dict[str, Any]] = {
        "NVLink": {"nvlink": 2 * chip.nvlink},
        "domain": {"domain": 9 * chip.domain},
        "memory": {"hbm": 2 * chip.hbm},
        "arithmetic": {"flops": {name: 2 * rate for name, rate in chip.flops.items()}},
    }
    for name, change in better.items():
        yield name, dataclasses.replace(job, gpu=dataclasses.replace(chip, **change))
    yield "network", dataclasses.replace(job, network=2 * job.adapter)
    yield "tokens travel once", dataclasses.replace(job, dispatch="once")
    yield "half the batch", dataclasses.replace(job, global_batch=job.global_batch // 2 or 1)
    if job.recompute == "full":
        yield "selective recomputation", dataclasses.replace(job, recompute="selective")
    if job.recompute == "selective":
        yield "no recomputation", dataclasses.replace(job, recompute="none")
    if job.attention == "eager":
        yield "one softmax kernel", dataclasses.replace(job, attention="softmax")
    if job.precision == "fp32":
        yield "16 bits", dataclasses.replace(job, precision="bf16")
    if job.sharding == "replicated" and job.overlap_param:
        yield "distributed optimizer", dataclasses.replace(job, sharding="zero1")


def utilisation(shape: ModelShape, job: Job, tokens_per_second: float) -> float:
    """The share of the data sheet's rate, by the FLOPs that have to be done: windows and frozen weights taken off."""
    keys, passes = job.attended / 2, 2 if job.lora else 3
    products = sum(
        count * part.products(keys * seen(part, job.attended) if isinstance(part, Attention) else keys)
        for part, count in shape.parts.items()
    )
    products += (1 + len(shape.further)) * shape.embedding_parameters
    return 2 * passes * products * tokens_per_second / job.gpu.rate(job.precision)


@pytest.mark.parametrize("name", SHAPES)
def test_no_job_is_impossible_and_what_helps_helps(name: str) -> None:
    shape, rng = SHAPES[name], random.Random(name)
    for _ in range(60):
        job = drawn(shape, rng)
        step, memory, told = predict(shape, job), predict_memory(shape, job), band(shape, job)
        assert math.isfinite(step.total) and min(step.parts.values()) >= 0, job
        assert 0 < utilisation(shape, job, step.tokens_per_second_per_gpu) < 0.85, job
        assert math.isfinite(memory.used) and min(memory.parts.values()) >= 0, job
        assert 0 < told.low <= 1 <= told.high, job
        for what, better in faster_ways(job):
            assert predict(shape, better).total <= step.total * (1 + 1e-9), (what, job)
