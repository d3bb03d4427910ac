# SPDX-License-Identifier: Apache-2.0
"""Searches for the fastest legal layouts of a recipe on given GPUs.

The planner's formulas predict speed and memory of a layout in a tenth of a millisecond. The formula of memory is scaled to
the rehearsal of the recipe itself. The rules of `nemo2.preflight.checks`, which include Megatron-Core's own checks,
then judge the layouts that seem to fit, fastest first, and a rehearsal counts the memory of the legal ones, until
enough are found.
"""

import copy
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple, Optional

from nemo2.base.advice import advice
from nemo2.base.counts import counted
from nemo2.base.errors import CannotBuild, ConfigError
from nemo2.base.gpus import HEADROOM
from nemo2.config import apply_overrides
from nemo2.config.walk import class_of
from nemo2.mcore.parallel.layout import Layout
from nemo2.models.shape import ModelShape
from nemo2.preflight.checks.arithmetic import divisors_of
from nemo2.preflight.checks.facts import Facts
from nemo2.preflight.checks.nearest import has_legal_layout
from nemo2.preflight.planner.fit import fit_of
from nemo2.preflight.planner.job import Job
from nemo2.preflight.planner.memory import predict_memory
from nemo2.preflight.planner.recipe import Subject
from nemo2.preflight.planner.step_time import StepTime, predict
from nemo2.preflight.rehearse.advice import FULL_RECOMPUTATION

MICRO_BATCHES = (1, 2, 4, 8)
MOST_CHUNKS = 12
MOST_TENSOR_RANKS = 8
SHORTEST_SHARE = 2048
"""The fewest tokens of a sequence per context-parallel rank. With fewer, attention is too short to hide the ring."""
RECOMPUTATION = ("none", "selective", "full")
# Megatron-Core rejects recompute_num_layers with selective recomputation.
_NOT_FULL = ("model.config.recompute_method=None", "model.config.recompute_num_layers=None")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A way to run the recipe: its job, the planner's prediction, and the overrides that produce it. ``needed`` are the
    bytes of the fullest GPU: by formula of a candidate, and by `fit_of` in a result."""

    layout: Layout
    job: Job
    step: StepTime
    needed: float
    overrides: tuple[str, ...] = ()
    why: str = ""

    @property
    def speed(self) -> float:
        """Tokens per second and GPU."""
        return self.step.tokens_per_second_per_gpu

    def __str__(self) -> str:
        recompute = "" if self.job.recompute == "none" else f", {self.job.recompute} recomputation"
        return f"{self.layout.describe(self.job.gpus)}, micro-batch {self.job.micro_batch}{recompute}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The result of a search.

    `best` are the fastest legal layouts, and `unchanged` is the unchanged recipe. `tried` are all layouts that fit, legal
    or not, and `number_tried` is the number of configurations searched.
    """

    best: tuple[Candidate, ...]
    unchanged: Candidate
    tried: tuple[Candidate, ...]
    number_tried: int


def search(subject: Subject, *, limit: int = 5, headroom: float = HEADROOM) -> SearchResult:
    """The fastest legal layouts of a recipe that fit its GPUs.

    The search varies layout, micro-batch and recomputation. Sequence length, global batch, precision and overlaps are
    the recipe's.

    Args:
        subject: A recipe as `nemo2.preflight.planner.recipe.read_recipe` reads it, with a `MegatronStrategy`.
        limit: The largest number of layouts to find.
        headroom: The fraction of the GPU's memory that must stay free.

    Raises:
        ConfigError: the strategy has no layout to search, or no legal layout fits.
    """
    if not subject.facts.sizes or subject.job.sharding == "fsdp":
        raise ConfigError(
            "`nemo2 plan --search` varies the parallel sizes of MegatronStrategy with Megatron-Core's data parallelism, and "
            f"trainer.strategy={class_of(subject.facts.strategy).__name__}"
            f"{' with fsdp set' if subject.facts.sizes else ''} has none to vary. Use MegatronStrategy without fsdp, or plan "
            "without --search."
        )
    capacity = subject.job.gpu.memory * (1 - headroom)
    estimate = predict_memory(subject.shape, subject.job).used
    fit = fit_of(subject.facts.recipe, subject.facts.machine)
    needed = estimate if fit is None else fit.needed
    step = predict(subject.shape, subject.job)
    unchanged = Candidate(layout=subject.facts.layout, job=subject.job, step=step, needed=needed)
    tried = fitting_ways(subject, capacity, needed / estimate)
    fitting = sorted(tried.fitting, key=lambda one: -one.speed)
    best = _legal(subject, fitting, limit, headroom)
    if not best:
        raise ConfigError(_nothing(subject, tried, capacity))
    best = tuple(dataclasses.replace(one, why=reason(one, unchanged, capacity)) for one in best)
    return SearchResult(best=best, unchanged=unchanged, tried=tuple(fitting), number_tried=tried.number)


def _nothing(subject: Subject, tried: "Tried", capacity: float) -> str:
    gpus = f"{subject.facts.world_size} x {subject.job.gpu.name}"
    if tried.number == 0:
        return (
            f"No layout of {gpus} splits data.global_batch_size={subject.job.global_batch} into equal micro-batches. Use a "
            f"global batch with more divisors ({advice('--global-batch', 'data.global_batch_size')}), or another number of GPUs."
        )
    if tried.fitting:
        return (
            f"{counted(len(tried.fitting), 'layout')} of {gpus} would fit in memory, but each breaks a rule. `nemo2 check` "
            "lists the rules that the recipe breaks."
        )
    return (
        f"No layout of {gpus} fits in memory: the smallest needs {tried.least / 2**30:.0f} GiB per GPU, and "
        f"{capacity / 2**30:.0f} GiB are usable. Use more GPUs, or shorter sequences ({advice('--seq', 'data.seq_length')})."
    )


class Tried(NamedTuple):
    """The candidates of a search: those that fit, the number of all candidates, and the least memory of any."""

    fitting: list[Candidate]
    number: int
    least: float


def fitting_ways(subject: Subject, capacity: float, scale: float) -> Tried:
    """Every layout and micro-batch size that divides the GPUs, the batch and the layers, with the least recomputation
    that fits in ``capacity`` bytes, by formula times ``scale``.

    The divisions only save predictions. The rules decide later whether a layout is legal.
    """
    facts, shape, job = subject.facts, subject.shape, subject.job
    fitting, number, least = [], 0, math.inf
    for layout in layouts(facts, shape, domain=job.gpu.domain):
        replicas = facts.world_size // layout.model_parallel_size
        for micro in MICRO_BATCHES:
            if job.global_batch % (micro * replicas):
                continue
            number += 1
            for recompute in RECOMPUTATION:
                way = _as_job(job, layout, micro, recompute)
                needed = scale * predict_memory(shape, way).used
                least = min(least, needed)
                if needed <= capacity:
                    fitting.append(Candidate(layout=layout, job=way, step=predict(shape, way), needed=needed))
                    break
    return Tried(fitting, number, least)


def layouts(facts: Facts, shape: ModelShape, *, domain: int) -> Iterator[Layout]:
    """The layouts whose sizes divide the GPUs, with each tensor-parallel group within one NVLink domain."""
    world = facts.world_size
    stages = [pp for pp in divisors_of(world) if len(shape.layers) % pp == 0 or pp == facts.layout.pp]
    shares = [cp for cp in divisors_of(world) if cp == 1 or (facts.seq_length or 0) // cp >= SHORTEST_SHARE]
    for tp, pp, cp in product(divisors_of(world), stages, shares):
        if world % (tp * pp * cp) or tp > min(domain, MOST_TENSOR_RANKS):
            continue
        for vp, ep in product(_chunks(shape, pp), _expert_sizes(shape, world // pp)):
            yield Layout(tp=tp, pp=pp, vp=vp, cp=cp, ep=ep, etp=1 if shape.experts else None, sp=tp > 1)


def _chunks(shape: ModelShape, pp: int) -> list[Optional[int]]:
    if pp == 1 or len(shape.layers) % pp or shape.mixers:
        return [None]
    return [None, *(size for size in divisors_of(len(shape.layers) // pp) if 1 < size <= MOST_CHUNKS)]


def _expert_sizes(shape: ModelShape, ranks: int) -> list[int]:
    return [size for size in divisors_of(ranks) if shape.experts % size == 0] if shape.experts else [1]


def _as_job(job: Job, layout: Layout, micro: int, recompute: str) -> Job:
    return dataclasses.replace(
        job,
        **Job.sizes_of(layout),
        sp=True,
        micro_batch=micro,
        recompute=recompute,
        recompute_method="uniform",
        recompute_layers=1,
        # Megatron-Core offloads activations only without a pipeline and without recomputation.
        offloaded_layers=0 if recompute != "none" or layout.pp > 1 else job.offloaded_layers,
        recomputed=("mlp",) if layout.etp is None else ("moe",),  # layouts of models with experts have an etp
        overlap_pp=bool(layout.vp),
        overlap_tp=job.overlap_tp and layout.tp > 1,
    )


def _legal(subject: Subject, fitting: Sequence[Candidate], limit: int, headroom: float) -> list[Candidate]:
    """The fastest candidate of each layout that breaks no rule on layouts and fits when it is rehearsed, at most
    ``limit``."""
    with_micro_batch = functools.cache(lambda micro: _with_micro_batch(subject.facts, micro))
    seen: set[tuple[Layout, int]] = set()
    best: dict[Layout, Candidate] = {}
    for one in fitting:
        way = one.layout, one.job.micro_batch
        if one.layout in best or way in seen:
            continue
        seen.add(way)
        if not has_legal_layout(dataclasses.replace(with_micro_batch(one.job.micro_batch), layout=one.layout)):
            continue
        overrides = overrides_of(subject, one)
        recipe = copy.deepcopy(subject.facts.recipe)
        recipe = apply_overrides(recipe, overrides) or recipe
        try:
            fit = fit_of(recipe, subject.facts.machine, headroom=headroom)
        except CannotBuild:
            continue
        if fit is not None and fit.fits:
            best[one.layout] = dataclasses.replace(one, overrides=overrides, needed=fit.needed)
        if len(best) == limit:
            break
    return list(best.values())


def _with_micro_batch(facts: Facts, micro: int) -> Facts:
    recipe = copy.deepcopy(facts.recipe)
    recipe.data.micro_batch_size = micro
    return dataclasses.replace(facts, recipe=recipe)


def overrides_of(subject: Subject, one: Candidate) -> tuple[str, ...]:
    """Overrides that turn the recipe into this candidate."""
    changes = one.layout.overrides(subject.facts.sizes)
    if one.job.micro_batch != subject.job.micro_batch:
        changes.append(f"data.micro_batch_size={one.job.micro_batch}")
    if _recomputed(one.job) != _recomputed(subject.job):
        changes += _recomputation(one.job, subject.job)
    if one.job.offloaded_layers != subject.job.offloaded_layers:
        changes.append("model.config.cpu_offloading=False")
    return tuple(changes)


def _recomputed(job: Job) -> tuple[Any, ...]:
    return job.recompute, job.recomputed, job.recompute_method, job.recompute_layers


def _recomputation(job: Job, unchanged: Job) -> Sequence[str]:
    if job.recompute == "full":
        return FULL_RECOMPUTATION
    not_full = _NOT_FULL if unchanged.recompute == "full" else ()
    if job.recompute == "selective":
        selected = f'model.config.recompute_modules=["{job.recomputed[0]}"]'
        return ("model.config.recompute_granularity=selective", selected, *not_full)
    return () if unchanged.recompute == "none" else ("model.config.recompute_granularity=None", *not_full)


def reason(one: Candidate, unchanged: Candidate, capacity: float) -> str:
    """Why the layout is good: the parts that take less time than in the original recipe, and the parts that take
    more."""
    before, after = unchanged.step.parts, one.step.parts
    # Per token, so that steps with other numbers of tokens can be compared.
    change = {
        name: (after.get(name, 0.0) / one.step.tokens - before.get(name, 0.0) / unchanged.step.tokens)
        * unchanged.step.tokens
        for name in {*before, *after}
    }
    total = unchanged.step.total
    gains = sorted((value, name) for name, value in change.items() if value < -0.005 * total)[:2]
    costs = sorted(((value, name) for name, value in change.items() if value > 0.005 * total), reverse=True)[:1]
    reasons = ["fits, unlike the unchanged recipe"] if unchanged.needed > capacity else []
    reasons += [f"{-value / total:.0%} less {name}" for value, name in gains]
    reasons += [f"{value / total:.0%} more {name}" for value, name in costs]
    return ", ".join(reasons) or "about the same as the unchanged recipe"


def as_dict(result: SearchResult) -> dict[str, Any]:
    """Plain data for JSON."""

    def one(candidate: Candidate) -> dict[str, Any]:
        return {
            "layout": candidate.layout.describe(candidate.job.gpus),
            "micro_batch": candidate.job.micro_batch,
            "recompute": candidate.job.recompute,
            "tokens_per_second_per_gpu": candidate.speed,
            "needed": candidate.needed,
            "overrides": list(candidate.overrides),
            "why": candidate.why,
        }

    return {
        "unchanged": one(result.unchanged),
        "best": [one(candidate) for candidate in result.best],
        "tried": result.number_tried,
        "fitting": len(result.tried),
    }
