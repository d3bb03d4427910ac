# SPDX-License-Identifier: Apache-2.0
"""Data parallelism: who sees which samples, where gradients meet, and what the distributed optimizer cuts."""

import inspect
from types import SimpleNamespace
from typing import Any

import torch

from nemo2.data.batch_sampler import StepBatchSampler
from nemo2.data.batch_size import BatchSizeSchedule
from nemo2.mcore.parallel.layout import Layout
from nemo2.report.pictures.ranks import groups_of
from nemo2.report.pictures.svg import Canvas
from tools.explained.kit import (
    COMMUNICATION,
    ELSEWHERE,
    LEFT,
    OF_RANK,
    PLAIN,
    SMALL,
    TOP,
    WIDTH,
    box,
    note,
    sheet,
    signed,
)
from tools.explained.traced import group, silent

DP, GLOBAL_BATCH, MICRO_BATCH = 4, 8, 1
_ACROSS = WIDTH - 2 * LEFT


def ddp() -> Canvas:
    """Every replica has its samples and all the weights; gradients meet once a step."""
    from megatron.core.distributed import DistributedDataParallel, finalize_model_grads

    (replicas,) = groups_of(Layout(), DP)["dp"]
    canvas = sheet(f"Data parallelism: {DP} replicas, a global batch of {GLOBAL_BATCH}")
    column = _ACROSS / DP
    for index, rank in enumerate(replicas):
        x, wide = LEFT + index * column, column - 8
        canvas.text(x + wide / 2, TOP + 10, f"rank {rank}", "ink", anchor="middle", strong=True)
        box(canvas, x, TOP + 18, wide, 24, "all weights", PLAIN)
        share = _samples(index)
        y = TOP + 52
        for number in range(0, len(share), MICRO_BATCH):
            samples = " ".join(map(str, share[number : number + MICRO_BATCH]))
            box(
                canvas,
                x,
                y,
                wide,
                40,
                f"micro-batch {number // MICRO_BATCH}\nsample {samples}",
                OF_RANK[index],
                size=SMALL,
            )
            y += 44
        box(canvas, x, y + 4, wide, 24, "gradients, sum", OF_RANK[index], size=SMALL)
        canvas.arrow(x + wide / 2, y + 30, x + wide / 2, y + 46, "accent")
        canvas.arrow(x + wide / 2, y + 74, x + wide / 2, y + 90)
        box(canvas, x, y + 92, wide, 24, "same step", PLAIN)
    box(
        canvas,
        LEFT,
        y + 48,
        _ACROSS - 8,
        26,
        f"all-reduce: the mean over {len(replicas)} replicas, once a step",
        COMMUNICATION,
    )
    return signed(canvas, y + 116, DistributedDataParallel, finalize_model_grads)


def zero1() -> Canvas:
    """A figure of one bucket: reduce-scattered, updated shard by shard, gathered."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    shapes = {"qkv": (48, 16), "proj": (16, 16), "up": (64, 16), "down": (16, 64)}
    buffer = bucketed(list(shapes.values()), dp=DP)
    names = dict(zip(buffer.params, shapes, strict=True))
    fills = dict(zip(buffer.params, OF_RANK, strict=True))
    canvas = sheet(f"The distributed optimizer (ZeRO-1) on {DP} replicas")
    left = 60.0
    unit = (WIDTH - LEFT - left) / buffer.numel

    def whole(y: float) -> None:
        for param, (start, end, _) in buffer.param_index_map.items():
            box(canvas, left + start * unit, y, (end - start) * unit, 24, names[param], fills[param], size=SMALL)
        for rank in range(1, DP):
            x = left + rank * buffer.numel / DP * unit
            for end in (y - 5, y + 24):
                canvas.line(x, end, x, end + 5, "ink")

    y = note(canvas, TOP + 10, f"gradients on each rank: a buffer of {buffer.numel:,} elements")
    whole(y)
    y += 30
    for rank in range(DP):
        x = left + (rank + 0.5) * buffer.numel / DP * unit
        canvas.arrow(x, y, x, y + 16, "accent")
    box(
        canvas,
        left,
        y + 18,
        WIDTH - LEFT - left,
        22,
        "reduce-scatter: each rank gets the mean of its shard",
        COMMUNICATION,
    )
    y += 50
    for rank in range(DP):
        canvas.text(LEFT, y + 15, f"rank {rank}", "ink", strong=True)
        canvas.rect(left, y, WIDTH - LEFT - left, 22, ELSEWHERE)
        found = shard(buffer, rank)
        for param, (start, end) in found.items():
            words = f"{end - start:,}" if (end - start) * unit > 34 else ""
            tip = f"{end - start:,} elements of {names[param]}"
            box(canvas, left + start * unit, y, (end - start) * unit, 22, words, fills[param], size=SMALL, tip=tip)
        y += 26
    y = note(canvas, y + 12, "fp32 weights and Adam's two moments exist for a rank's shard only; Adam steps it", x=left)
    box(canvas, left, y - 4, WIDTH - LEFT - left, 22, "all-gather: the new weights, whole on each rank", COMMUNICATION)
    whole(y + 26)
    return signed(canvas, y + 50, DistributedOptimizer, _ParamAndGradBucketGroup)


def bucketed(shapes: list[tuple[int, ...]], *, dp: int, bucket_size: Any = None) -> Any:
    """Megatron-Core's ``_ParamAndGradBuffer`` of weights of these shapes, without memory; ``params`` in their order."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    with silent("meta"):
        params = [torch.nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
        names = {param: str(index) for index, param in enumerate(params)}
        given: dict[str, Any] = {"params": params}
        if "params_with_names" in inspect.signature(_ParamAndGradBuffer).parameters:
            # From Megatron-Core 0.19 on the distributed optimizer lays the parameters out.
            layout = DistributedOptimizer._compute_per_buffer_param_layout(params, bucket_size, dp, config)
            given = {"params_with_names": list(names.items()), "param_layout": layout}
        ranks = group(dp)
        return _ParamAndGradBuffer(
            ddp_config=config,
            param_dtype=torch.float32,
            grad_dtype=torch.float32,
            data_parallel_group=ranks,
            bucket_size=bucket_size,
            param_to_name=names,
            gradient_scaling_factor=1.0,
            param_indices=list(range(len(params))),
            nccl_ub=False,
            pg_collection=SimpleNamespace(tp=group(1), dp_cp=ranks),
            **given,
        )


def shard(buffer: Any, rank: int) -> dict[Any, tuple[int, int]]:
    """The positions in the buffer of a rank's parts of each parameter, as `DistributedOptimizer` shards its first
    bucket."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    seen: Any = SimpleNamespace(
        data_parallel_group=group(buffer.data_parallel_world_size, rank),
        buckets=buffer.buckets,
        num_optimizer_shards=None,  # asked from Megatron-Core 0.19 on; None: as many as ranks
        param_index_map=buffer.param_index_map,
    )
    found = DistributedOptimizer._build_model_gbuf_range(seen, 0)["param_map"]
    return {param: (one["gbuf_world"].start, one["gbuf_world"].end) for param, one in found.items()}


def _samples(replica: int) -> list[int]:
    sampler = StepBatchSampler(
        total_samples=GLOBAL_BATCH,
        schedule=BatchSizeSchedule(GLOBAL_BATCH),
        micro_batch_size=MICRO_BATCH,
        data_parallel_rank=replica,
        data_parallel_size=DP,
    )
    return next(iter(sampler))
