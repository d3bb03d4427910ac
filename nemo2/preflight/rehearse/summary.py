# SPDX-License-Identifier: Apache-2.0
"""Summarizes the records of one rank's rehearsed step (`rank.Ran`) as counts per step of the recipe
(`counts.RankRehearsal`)."""

import re
from collections import defaultdict
from typing import Any

from nemo2.preflight.rehearse.counts import CollectiveCount, FlopCount, MemoryCount, RankRehearsal
from nemo2.preflight.rehearse.rank import Ran
from nemo2.preflight.rehearse.tracker import MESSAGES, SAVED, WORK

_LOGITS = "logits"

_GROUPS = {
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "expert_tensor_and_expert",
    "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "model",
    "default_pg": "world",
    "": "world",
}
"""The words for Megatron-Core's descriptions of groups that aren't a part of the description (`_group`)."""

_PER_STEP = ("data", "expert_data")
"""The groups whose collectives run once per step, at any point of the schedule: the reduction of gradient buckets and the
gather of parameters."""


def summarise(ran: Ran, *, kind: str, rank: int, stage: int, seconds: float) -> RankRehearsal:
    """The counts of a rank. Call it before the rank is torn down, because the strategy supplies the layers of the chunks."""
    growth = ran.num_microbatches_of_step / ran.num_microbatches
    flops: defaultdict[tuple[str, str], float] = defaultdict(float)
    for (kernel, phase), count in ran.tracker.flops.items():
        if phase in ("forward", "backward"):
            flops[kernel, phase] += count * growth
    return RankRehearsal(
        kind=kind,
        rank=rank,
        stage=stage,
        layers=tuple(_layers(chunk) for chunk in ran.strategy.megatron_parallel.unwrapped),
        memory=memory_of(ran),
        collectives=_collectives(ran, growth),
        flops=tuple(FlopCount(kind=k, phase=p, flops=count) for (k, p), count in sorted(flops.items())),
        num_microbatches=ran.num_microbatches_of_step,
        num_microbatches_rehearsed=ran.num_microbatches,
        seconds=seconds,
    )


def memory_of(ran: Ran) -> MemoryCount:
    """The memory at the peak, with the model state of a step after the first."""
    activations: dict[str, int] = {}
    logits = messages = working = 0
    for (holder, part), size in sorted(ran.at_peak.items(), key=lambda item: -item[1]):
        if not size or holder not in (SAVED, WORK, MESSAGES):
            continue
        if part == _LOGITS:
            logits += size
        elif holder == SAVED:
            activations[part] = size
        elif holder == MESSAGES:
            messages += size
        else:
            working += size
    return MemoryCount(
        **ran.state,
        activations=activations,
        logits=logits,
        messages=messages,
        working=working,
        saved_peak=ran.saved_peak,
    )


def _collectives(ran: Ran, growth: float) -> tuple[CollectiveCount, ...]:
    sums: dict[tuple[str, str, int, str], list[float]] = {}
    for phase, call in ran.calls:
        if phase == "build" or not call.bytes or call.ranks == 1:
            continue
        # In the words of `Layout`: `data` for `INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP`.
        words = re.sub("^INTRA_PARTIAL_|(_MODEL)?_PARALLEL|_GROUP|_WITH_CP", "", call.group)
        group = _GROUPS.get(call.group, words.lower())
        per = "step" if group in _PER_STEP or phase in ("finalize", "optimizer") else "microbatch"
        factor = growth if per == "microbatch" else 1
        entry = sums.setdefault((call.kind, group, call.ranks, per), [0.0, 0.0])
        entry[0] += factor
        entry[1] += call.bytes * factor
    counts = [
        CollectiveCount(kind=kind, group=group, ranks=ranks, per=per, calls=calls, bytes=size)
        for (kind, group, ranks, per), (calls, size) in sums.items()
    ]
    return tuple(sorted(counts, key=lambda count: -count.bytes))


def _layers(chunk: Any) -> int:
    block = getattr(chunk, "decoder", None)
    return len(getattr(block, "layers", ()))
