# SPDX-License-Identifier: Apache-2.0
"""A pipeline stage of a job, rehearsed by its first rank."""

import copy
import re
import time
from collections import defaultdict
from typing import Any, Optional

import fiddle as fdl

from nemo2.mcore.parallel.layout import Layout, groups_of, rank_order
from nemo2.mcore.settle import Machine, world_of
from nemo2.mcore.settle.agreement import tokenizer_choice
from nemo2.preflight.checks.tokenizers import known_by_size
from nemo2.preflight.rehearse.counts import CollectiveCount, FlopCount, MemoryCount, RankRehearsal
from nemo2.preflight.rehearse.kernels import plain_kernels, te_kernels
from nemo2.preflight.rehearse.rank import Ran, run_rank
from nemo2.preflight.rehearse.tracker import MESSAGES, SAVED, WORK
from nemo2.training.connecting import connect_parts


def rehearse_rank(recipe: Any, *, stage: int, kernels: str = "te", microbatches: Optional[int] = None) -> RankRehearsal:
    """Rehearse the first rank of pipeline stage ``stage``, which is rank 0 of its other groups. ``microbatches``: see
    `rank.run_rank`."""
    started = time.perf_counter()
    layout, world = Layout.of(recipe.trainer.strategy), world_of(recipe, Machine()).size
    rank = first_rank_of_stage(recipe, stage)
    copies = keeps_weights_in_eight_bits(recipe)
    recipe = in_sixteen_bits(recipe)

    def parts() -> tuple[Any, Any, Any]:
        call = fdl.build(recipe).keywords
        model, data = call["model"], call["data"]
        if (tokenizer := known_by_size(data)) is not None:  # otherwise the data module would prepare its files now
            data.tokenizer = tokenizer
        connect_parts(
            model,
            data,
            optim=call.get("optim"),
            tokenizer=call.get("tokenizer", tokenizer_choice(recipe)),
            model_transform=call.get("model_transform") or call.get("peft"),
        )
        return model, data, call["trainer"]

    patches = te_kernels() if kernels == "te" else plain_kernels()
    return run_rank(
        parts,
        rank=rank,
        world_size=world,
        as_on_gpu=kernels == "te",
        patches=patches,
        microbatches=microbatches,
        weights_in_eight_bits=copies,
        inspect=lambda ran: summarise(
            ran, kind=_kind(stage, layout.pp), rank=rank, stage=stage, seconds=time.perf_counter() - started
        ),
    )


def stages_of(recipe: Any, *, every: bool = False) -> list[int]:
    """The pipeline stages to rehearse, which represent all stages: the first, the second and the last. Of the middle stages
    the second keeps the most micro-batches."""
    stages = Layout.of(recipe.trainer.strategy).pp
    return list(range(stages)) if every else sorted({0, min(1, stages - 1), stages - 1})


def first_rank_of_stage(recipe: Any, stage: int) -> int:
    """The first rank of a stage, in Megatron-Core's own numbering."""
    strategy, world = recipe.trainer.strategy, world_of(recipe, Machine()).size
    order = rank_order(tp_pp_dp=bool(strategy.use_tp_pp_dp_mapping))
    return groups_of(Layout.of(strategy), world, order=order)["pp"][0][stage]


def _kind(stage: int, stages: int) -> str:
    if stages == 1:
        return "only stage"
    if stage == 0:
        return "first stage"
    return "last stage" if stage == stages - 1 else "middle stage" if stage == 1 else f"stage {stage}"


_EIGHT_BITS: dict[str, Any] = {
    "fp8": None,
    "fp4": None,
    "fp8_params": None,
    "fp8_param_gather": False,
    "first_last_layers_bf16": False,
    "reuse_grad_buf_for_mxfp8_param_ag": False,
}


def in_sixteen_bits(recipe: Any) -> Any:
    """A copy of ``recipe`` without fp8 and fp4, whose kernels a rehearsal can't replace. A recipe in 16 or 32 bits is
    returned itself."""
    if not computes_in_eight_bits(recipe):
        return recipe
    recipe = copy.deepcopy(recipe)
    plugin, model = recipe.trainer.plugins, recipe.model.config
    leave_out_eight_bits(plugin)
    for name in ("moe_router_padding_for_fp8", "moe_router_padding_for_quantization"):
        if getattr(model, name, False):
            setattr(model, name, False)
    return recipe


def leave_out_eight_bits(plugin: Any) -> None:
    """Switch fp8 and fp4 off, and unset their options, which would otherwise cause a warning that they have no effect."""
    from nemo2.mcore.precision import OF_EIGHT_BITS

    for name, off in _EIGHT_BITS.items():
        if getattr(plugin, name, off) != off:
            setattr(plugin, name, off)
    for name in OF_EIGHT_BITS:
        if name in getattr(plugin, "__arguments__", ()):
            delattr(plugin, name)


def keeps_weights_in_eight_bits(recipe: Any) -> bool:
    """Whether the run keeps 8-bit copies of the weights in addition to the weights: with fp8, but without fp8 parameters."""
    plugin = recipe.trainer.plugins
    return computes_in_eight_bits(recipe) and not getattr(plugin, "fp8_param_gather", False)


def computes_in_eight_bits(recipe: Any) -> bool:
    """Whether the precision plugin uses fp8 or fp4."""
    plugin = recipe.trainer.plugins
    return bool(getattr(plugin, "fp8", None) or getattr(plugin, "fp4", None))


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
