# SPDX-License-Identifier: Apache-2.0
"""Finds the smallest change that makes a job fit, by rehearsing the candidates."""

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

from nemo2.base.gpus import OUTSIDE_TORCH
from nemo2.config import apply_overrides
from nemo2.mcore.parallel.layout import Layout
from nemo2.mcore.settle import Machine, world_of
from nemo2.preflight.checks import find_problems
from nemo2.preflight.rehearse.counts import RankRehearsal, Verdict
from nemo2.preflight.rehearse.stage import rehearse_rank

MAX_TRIES = 10
FULL_RECOMPUTATION = (
    "model.config.recompute_granularity=full",
    "model.config.recompute_method=uniform",
    "model.config.recompute_num_layers=1",
)
"""The overrides that recompute every layer."""


def smallest_change(recipe: Any, ranks: tuple[RankRehearsal, ...], verdict: Verdict, *, kernels: str) -> Verdict:
    """``verdict`` with the first legal candidate that makes the fullest rank fit. Without such a candidate it is unchanged.

    Each candidate costs one rehearsal of the fullest rank. At most `MAX_TRIES` candidates are rehearsed.
    """
    fullest = max(ranks, key=lambda rank: rank.memory.total)
    tries = 0
    for change in candidates(recipe):
        changed = copy.deepcopy(recipe)
        apply_overrides(changed, change)
        if find_problems(changed) or not _divides(changed):
            continue
        if tries == MAX_TRIES:
            break
        tries += 1
        stages = changed.trainer.strategy.pipeline_model_parallel_size
        stage = stages - 1 if fullest.kind == "last stage" else min(fullest.stage, stages - 1)
        try:
            rank = rehearse_rank(changed, stage=stage, kernels=kernels)
        except (ValueError, AssertionError, RuntimeError):
            continue  # Megatron-Core rejects the change
        needed = rank.memory.total + OUTSIDE_TORCH
        if dataclasses.replace(verdict, needed=needed).fits:
            return dataclasses.replace(verdict, change=change, change_needs=needed)
    return verdict


def candidates(recipe: Any) -> Iterator[tuple[str, ...]]:
    """The candidate changes in the order of their cost: the distributed optimizer, a little recomputation, smaller
    micro-batches, more parallelism, full recomputation."""
    layout, data, model = Layout.of(recipe.trainer.strategy), recipe.data, recipe.model.config
    if not getattr(recipe.optim.config, "use_distributed_optimizer", True):
        yield ("optim.config.use_distributed_optimizer=True",)
    tp, pp, cp = layout.tp, layout.pp, layout.cp
    recomputing = getattr(model, "recompute_granularity", None)
    selective = "model.config.recompute_granularity=selective"
    if recomputing is None:
        if getattr(model, "attn_logit_softcapping", None) is not None:
            yield (selective, 'model.config.recompute_modules=["core_attn"]')
        part = "moe" if getattr(model, "num_moe_experts", None) else "mlp"
        yield (selective, f'model.config.recompute_modules=["{part}"]')
    if data.micro_batch_size > 1:
        yield (f"data.micro_batch_size={data.micro_batch_size // 2}",)
    more_tp = (f"strategy.tensor_model_parallel_size={2 * tp}", "strategy.sequence_parallel=True")
    more_cp = (f"strategy.context_parallel_size={2 * cp}",)
    more_pp = (f"strategy.pipeline_model_parallel_size={2 * pp}",)
    if 2 * tp <= 8:
        yield more_tp
    if data.seq_length > 8192:
        yield more_cp
    yield more_pp
    if recomputing != "full":
        yield FULL_RECOMPUTATION
        if 2 * tp <= 8:
            yield (*more_tp, *FULL_RECOMPUTATION)
        yield (*more_pp, *FULL_RECOMPUTATION)
    if 4 * tp <= 8:
        yield (f"strategy.tensor_model_parallel_size={4 * tp}", "strategy.sequence_parallel=True")


def _divides(recipe: Any) -> bool:
    return Layout.of(recipe.trainer.strategy).world_problem(world_of(recipe, Machine()).size) is None
