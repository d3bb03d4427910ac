# SPDX-License-Identifier: Apache-2.0
"""The timeline of a rehearsed step: the counts divided by a GPU's rates, in the order of the pipeline's schedule.

The timeline illustrates dependencies and messages. It is not a forecast: `nemo2 plan` has a calibrated model of time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

from nemo2.base.gpus import GPU
from nemo2.preflight.rehearse.counts import CollectiveCount, RankRehearsal, Rehearsal
from nemo2.report.pictures.pipeline import Messages
from nemo2.report.pictures.schedule import Schedule, Timeline, timeline

_INSIDE = ("tensor", "context", "expert", "expert_tensor", "expert_tensor_and_expert", "tensor_and_context")
"""Groups that exchange messages in the middle of a forward or backward pass."""
_REPLICAS = ("data", "expert_data")
REACHED = 0.5
"""The fraction of the data sheet's FLOP/s that the timeline assumes for matrix products."""
_SHOWN, _SHOWN_INTERLEAVED = 4, 2
"""The largest number of micro-batches per stage to draw. The steady state repeats itself, and passes of chunks are short."""


@dataclass(frozen=True, kw_only=True)
class StepTimeline:
    """The timeline of a step, with times in milliseconds."""

    timeline: Timeline
    messages: Messages
    note: str = ""


def step_timeline(rehearsal: Rehearsal, gpu: GPU) -> Optional[StepTimeline]:
    """The timeline of a step. None: the recipe has no pipeline."""
    sizes = rehearsal.sizes
    stages, chunks = sizes["pp"] or 1, sizes["vp"] or 1
    if stages == 1:
        return None
    ranks = [_rank_of(rehearsal, stage) for stage in range(stages)]
    total = ranks[0].num_microbatches
    shown = min(total, (_SHOWN if chunks == 1 else _SHOWN_INTERLEAVED) * stages)
    forward = [_seconds(rank, "forward", gpu) / total * 1e3 for rank in ranks]
    backward = [_seconds(rank, "backward", gpu) / total * 1e3 for rank in ranks]
    messages = [sum(_time(c, gpu) for c in rank.collectives if c.group in _INSIDE) / total * 1e3 for rank in ranks]
    whole = [sum(times) for times in zip(forward, backward, messages, strict=True)]
    # Forward and backward have about the same number of messages. The timeline has one ratio of forward to backward for
    # all stages.
    mean = sum(whole) / stages
    share = sum(forward) / max(sum(forward) + sum(backward), 1e-12)
    transfer = max(_transfer(rank, gpu) for rank in ranks) * 1e3
    drawn = timeline(
        Schedule(pp=stages, vp=sizes["vp"], num_microbatches=shown),
        forward=mean * share,
        backward=mean * (1 - share),
        weights=_weights(ranks, whole, chunks),
        transfer=transfer,
    )
    return StepTimeline(
        timeline=drawn,
        messages=Messages(
            inside=[m / max(w, 1e-12) for m, w in zip(messages, whole, strict=True)],
            transfer=transfer,
            before=[_over_replicas(rank, ("all_gather",), gpu) * 1e3 for rank in ranks],
            after=[_over_replicas(rank, ("reduce_scatter", "all_reduce"), gpu) * 1e3 for rank in ranks],
        ),
        note="" if shown == total else f"the first {shown} of {total} micro-batches",
    )


def _rank_of(rehearsal: Rehearsal, stage: int) -> RankRehearsal:
    """The rehearsed rank that represents a stage: the stage's own rank, or that of the middle stages."""
    for rank in rehearsal.ranks:
        if rank.stage == stage:
            return rank
    return rehearsal.rank("middle stage")


def _seconds(rank: RankRehearsal, phase: str, gpu: GPU) -> float:
    return sum(count.flops for count in rank.flops if count.phase == phase) / (REACHED * gpu.rate("bf16"))


def _time(count: CollectiveCount, gpu: GPU) -> float:
    """The seconds of the collectives, one after another, as rings: see `CollectiveCount.bytes` for the moved bytes."""
    around = (count.ranks - 1) / count.ranks * (2 if count.kind == "all_reduce" else 1)
    crossing = count.ranks > gpu.domain or count.group in _REPLICAS or count.group == "pipeline"
    moved = count.bytes * (1 if count.kind in ("send", "receive", "send_receive") else around)
    return moved / (gpu.network if crossing else gpu.nvlink)


def _transfer(rank: RankRehearsal, gpu: GPU) -> float:
    """The seconds of one message to the next stage."""
    sent = [count for count in rank.collectives if count.kind == "send" and count.group == "pipeline" and count.calls]
    return max((count.bytes / count.calls / gpu.network for count in sent), default=0.0)


def _over_replicas(rank: RankRehearsal, kinds: tuple[str, ...], gpu: GPU) -> float:
    return sum(_time(c, gpu) for c in rank.collectives if c.group in _REPLICAS and c.kind in kinds)


def _weights(ranks: Sequence[RankRehearsal], whole: Sequence[float], chunks: int) -> list[list[float]]:
    """The time of each chunk by its layers. A stage's time beyond its layers counts for the last chunk, which has the loss
    on the last stage. On the first stage it counts for the first chunk, which has the embedding."""
    per_layer = min(time / max(1, sum(rank.layers)) for rank, time in zip(ranks, whole, strict=True))
    weights = []
    for index, (rank, time) in enumerate(zip(ranks, whole, strict=True)):
        layers = [float(count) for count in rank.layers] if len(rank.layers) == chunks else [1.0] * chunks
        row = [count * per_layer for count in layers]
        beyond = max(0.0, time - sum(row))
        row[0 if index == 0 else -1] += beyond
        weights.append(row)
    return weights
