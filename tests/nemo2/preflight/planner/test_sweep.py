# SPDX-License-Identifier: Apache-2.0
"""Jobs drawn at random, of every kind and far from what anybody published: no time is impossible, and what helps helps."""

import dataclasses
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest

from bench.planner.rows import decoder
from nemo2.base.gpus import NAMES, gpu
from nemo2.models.parts import Attention
from nemo2.models.shape import ModelShape
from nemo2.preflight.planner.error_band import band
from nemo2.preflight.planner.job import Job
from nemo2.preflight.planner.layer_time import seen
from nemo2.preflight.planner.memory import predict_memory
from nemo2.preflight.planner.step_time import predict


def shape(
    layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, ffn: int, vocab: int, **more: Any
) -> ModelShape:
    sizes: dict[str, Any] = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "ffn": ffn,
    }
    return decoder(**sizes, vocab=vocab, **more)


LATENT = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_pos_emb_head_dim": 64, "mtp_num_layers": 1}
MIXERS = {"mamba_head_dim": 64, "mamba_state_dim": 128, "mamba_num_groups": 8}
BLOCKS = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
# layers, hidden, heads, kv_heads, head_dim, ffn, vocab
SHAPES = {
    "tiny": shape(2, 64, 4, 2, 16, 256, 1000),
    "8b": shape(32, 4096, 32, 8, 128, 14336, 128256),
    "405b": shape(126, 16384, 128, 8, 128, 53248, 128256),
    "windows": shape(
        42, 3584, 16, 8, 256, 14336, 256000, window_size=(4095, 0), window_attn_skip_freq=2, tied=True
    ),
    "few experts": shape(32, 4096, 32, 8, 128, 14336, 32000, experts=8, topk=2, moe_ffn=14336),
    "one choice": shape(
        48, 5120, 40, 8, 128, 16384, 202048, experts=128, topk=1, moe_ffn=8192, shared_ffn=8192, dense_layers=24
    ),
    "latent attention": shape(
        61, 7168, 128, 128, 128, 18432, 129280, experts=256, topk=8, moe_ffn=2048, shared_ffn=2048, dense_layers=3, **LATENT
    ),
    "hybrid": shape(
        52, 2688, 32, 2, 128, 1856, 131072, gated=False, experts=128, topk=6, moe_ffn=1856, shared_ffn=3712,
        hybrid_override_pattern=BLOCKS, mamba_num_heads=64, **MIXERS,
    ),
    "mixers alone": shape(56, 4096, 32, 8, 128, 0, 256000, hybrid_override_pattern="M" * 56, **MIXERS),
}  # fmt: skip
PARTS = (("core_attn",), ("mlp",), ("moe",), ("moe_act", "layernorm"), ("mla_up_proj",))
HELPS = (
    *("overlap_grad", "overlap_param", "overlap_tp", "overlap_pp", "overlap_ep", "cuda_graphs"),
    *("graphed_experts", "fused_experts", "capacity", "compiled", "low_attention"),
)


def drawn(model: ModelShape, rng: random.Random) -> Job:
    """Anything from one GPU to 16,384, tensor-parallel over machines too, experts over as many ranks as divide."""
    sizes = {"tp": (1, 1, 2, 4, 8, 16, 64), "pp": (1, 1, 2, 4, 16), "cp": (1, 1, 2, 16), "dp": (1, 1, 2, 3, 8, 64, 512)}
    tp, pp, cp, dp = (rng.choice(sizes[name]) for name in sizes)
    if tp * pp * cp * dp > 16384:
        return drawn(model, rng)
    ranks = tp * cp * dp
    ep = etp = 1
    if model.experts:
        ep = rng.choice([size for size in (1, 2, 8, 16, 64, 128) if model.experts % size == ranks % size == 0])
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
    model, rng = SHAPES[name], random.Random(name)
    for _ in range(60):
        job = drawn(model, rng)
        step, memory, told = predict(model, job), predict_memory(model, job), band(model, job)
        assert math.isfinite(step.total) and min(step.parts.values()) >= 0, job
        assert 0 < utilisation(model, job, step.tokens_per_second_per_gpu) < 0.85, job
        assert math.isfinite(memory.used) and min(memory.parts.values()) >= 0, job
        assert 0 < told.low <= 1 <= told.high, job
        for what, better in faster_ways(job):
            assert predict(model, better).total <= step.total * (1 + 1e-9), (what, job)
