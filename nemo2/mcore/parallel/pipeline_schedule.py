# SPDX-License-Identifier: Apache-2.0
"""Pipeline schedules as orders of work and as timelines, from Megatron-Core's own tables.

On each rank, a step of a pipeline is a list of forwards and backwards of one micro-batch through one model chunk.
`rank_order` derives this list from Megatron-Core's `get_pp_rank_microbatches`, `get_schedule_table` and
`convert_schedule_table_to_order`. `timeline` simulates the lists of all ranks: a pass starts as soon as its rank is free
and its inputs have been computed. By default a transfer takes no time and doesn't occupy the sender.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal, Optional

from nemo2.base.errors import ConfigError
from nemo2.mcore.parallel.layout import Layout

Phase = Literal["warm-up", "steady", "drain"]
_MOST_DRAWN = 16


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The settings that determine the order of work.

    Raises:
        ConfigError: Megatron-Core would reject the interleaving.
    """

    pp: int
    num_microbatches: int
    vp: Optional[int] = None
    """Model chunks per rank. None: not interleaved."""
    group_size: Optional[int] = None
    """The consecutive micro-batches of a chunk before the next chunk's (``microbatch_group_size_per_vp_stage``). None:
    ``pp``."""
    overlap_moe_expert_parallel_comm: bool = False
    """Run one more forward before the first backward, behind which Megatron-Core hides the experts' communication."""
    all_forward_first: bool = False
    """GPipe's order: every forward, then every backward. Megatron-Core doesn't have this schedule. It serves comparisons."""

    def __post_init__(self) -> None:
        if self.pp < 1 or self.num_microbatches < 1:
            raise ConfigError(f"pp={self.pp}, num_microbatches={self.num_microbatches}: must both be at least 1.")
        if problem := self.layout.interleaving_problem(self.num_microbatches, self.group_size):
            raise ConfigError(problem)

    @property
    def layout(self) -> Layout:
        return Layout(pp=self.pp, vp=self.vp)

    @property
    def interleaved(self) -> bool:
        return self.layout.interleaved

    @property
    def chunks(self) -> int:
        return (self.vp or 1) if self.interleaved else 1

    @property
    def group(self) -> int:
        return self.group_size or self.pp

    @property
    def name(self) -> str:
        if self.all_forward_first:
            return "all forward, then all backward (GPipe)"
        if self.pp == 1:
            return "no pipeline"
        return f"interleaved 1F1B, {self.vp} virtual stages" if self.interleaved else "1F1B"

    @property
    def legible(self) -> "Schedule":
        """The schedule with as many of its micro-batches as a picture can show."""
        most = max(2 * self.group, _MOST_DRAWN // self.chunks)
        fewer = most - most % self.group if self.interleaved else most
        return self if self.num_microbatches <= most else replace(self, num_microbatches=fewer)


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward or backward of one micro-batch through one model chunk of a rank."""

    forward: bool
    chunk: int
    microbatch: int
    phase: Phase = "steady"


@dataclass(frozen=True, slots=True)
class Slot:
    """A pass with its start and end, in the unit of the costs."""

    work: Pass
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The passes of every pipeline rank over time, from 0 to `span`."""

    schedule: Schedule
    slots: tuple[tuple[Slot, ...], ...]
    """The passes by pipeline rank, in order of time."""

    @property
    def span(self) -> float:
        return max(row[-1].end for row in self.slots)

    def busy(self, rank: int) -> float:
        return sum(slot.end - slot.start for slot in self.slots[rank])

    def idle_fraction(self, rank: int) -> float:
        """The fraction of the step in which a rank is idle."""
        return 1 - self.busy(rank) / self.span

    @property
    def bubble_fraction(self) -> float:
        """The mean fraction of the step in which ranks are idle."""
        return sum(map(self.idle_fraction, range(len(self.slots)))) / len(self.slots)

    @property
    def bubble_overhead(self) -> float:
        """The idle time over the time of the passes, (p - 1) / m for 1F1B: the measure of the Megatron-LM papers."""
        return self.bubble_fraction / (1 - self.bubble_fraction)

    def in_flight(self, rank: int) -> int:
        """The largest number of micro-batches of any chunk whose activations a rank keeps at the same time, between forward
        and backward."""
        held = most = 0
        for slot in self.slots[rank]:
            held += 1 if slot.work.forward else -1
            most = max(most, held)
        return most


def schedule_of(recipe: Any, *, chunks: Sequence[int], num_microbatches: int) -> Schedule:
    """The schedule of a recipe whose stages have these numbers of chunks.

    Raises:
        ConfigError: Megatron-Core would reject the interleaving.
    """
    return Schedule(
        pp=len(chunks),
        vp=chunks[0] if chunks[0] > 1 else None,
        num_microbatches=num_microbatches,
        group_size=recipe.trainer.strategy.microbatch_group_size_per_vp_stage,
        overlap_moe_expert_parallel_comm=bool(getattr(recipe.model.config, "overlap_moe_expert_parallel_comm", False)),
    )


def rank_order(schedule: Schedule, rank: int) -> tuple[Pass, ...]:
    """The work of pipeline rank ``rank`` in one training step, in order."""
    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table
    from megatron.core.transformer.cuda_graphs import convert_schedule_table_to_order

    chunks = schedule.chunks
    # The part of a communicator that Megatron-Core reads to count a rank's warm-up passes.
    communicator: Any = SimpleNamespace(
        pp_group=SimpleNamespace(size=lambda: schedule.pp, rank=lambda: rank),
        virtual_pipeline_model_parallel_size=schedule.vp if schedule.interleaved else None,
    )
    _, _, warmup, _ = get_pp_rank_microbatches(
        schedule.num_microbatches,
        chunks,
        schedule.group,
        overlap_moe_expert_parallel_comm=schedule.overlap_moe_expert_parallel_comm,
        p2p_communicator=communicator,
    )
    if schedule.all_forward_first:
        warmup = schedule.num_microbatches * chunks
    # Without interleaving a rank has one chunk, with its micro-batches in order.
    group = schedule.group if schedule.interleaved else schedule.num_microbatches
    table = get_schedule_table(schedule.num_microbatches, chunks, group)
    order = convert_schedule_table_to_order(warmup, chunks, table)
    steady_until = len(order) - warmup
    passes = []
    forwards, backwards = [0] * chunks, [0] * chunks
    for index, entry in enumerate(order):
        chunk, counters = (entry - 1, forwards) if entry > 0 else (-entry - 1, backwards)
        phase: Phase = "warm-up" if index < warmup else "steady" if index < steady_until else "drain"
        passes.append(Pass(forward=entry > 0, chunk=chunk, microbatch=counters[chunk], phase=phase))
        counters[chunk] += 1
    return tuple(passes)


def timeline(
    schedule: Schedule,
    *,
    forward: float = 1.0,
    backward: float = 2.0,
    weights: Optional[Sequence[Sequence[float]]] = None,
    transfer: float = 0.0,
    sender_waits: bool = False,
) -> Timeline:
    """Simulate a schedule.

    Args:
        schedule: The order of work.
        forward: The time of one micro-batch's forward through a whole stage of average weight, all its chunks together.
        backward: The same for its backward: twice the forward's for matrix products, three times with full activation
            recomputation.
        weights: The weight of each chunk, by rank and chunk, in any unit, such as its number of layers. None: equal
            weights.
        transfer: The time from the end of a pass until the next stage can use its result.
        sender_waits: The sender is busy during the transfer too (``overlap_p2p_comm=False``). False: it continues with
            its next pass.

    Raises:
        ConfigError: a time or a weight is negative, or all weights are zero.
    """
    shares = _shares(schedule, weights)
    if forward < 0 or backward < 0 or transfer < 0:
        raise ConfigError(f"forward={forward}, backward={backward}, transfer={transfer}: times must not be negative.")
    orders = [rank_order(schedule, rank) for rank in range(schedule.pp)]
    done: dict[tuple[bool, int, int], float] = {}
    rows: list[list[Slot]] = [[] for _ in orders]
    free = [0.0] * schedule.pp
    last = schedule.pp * schedule.chunks - 1
    progress = True
    while progress:
        progress = False
        for rank, order in enumerate(orders):
            while len(rows[rank]) < len(order):
                work = order[len(rows[rank])]
                stage = work.chunk * schedule.pp + rank
                ready = _ready(work, stage, last, done, transfer)
                if ready is None:
                    break
                start = max(free[rank], ready)
                end = start + (forward if work.forward else backward) * shares[rank][work.chunk]
                done[work.forward, stage, work.microbatch] = end
                sends = stage != (last if work.forward else 0)
                free[rank] = end + transfer * (sends and sender_waits)
                rows[rank].append(Slot(work, start, end))
                progress = True
    stuck = [rank for rank, order in enumerate(orders) if len(rows[rank]) < len(order)]
    # Each of Megatron-Core's schedules runs to its end, so a deadlock is a fault of this module.
    assert not stuck, f"the passes of pipeline ranks {stuck} deadlock"
    return Timeline(schedule=schedule, slots=tuple(map(tuple, rows)))


def _ready(
    work: Pass, stage: int, last: int, done: dict[tuple[bool, int, int], float], transfer: float
) -> Optional[float]:
    """The time at which the inputs of a pass are ready. None: they haven't been computed yet."""
    if work.forward:
        before = done.get((True, stage - 1, work.microbatch)) if stage else 0.0
        return before if before is None or stage == 0 else before + transfer
    own = done.get((True, stage, work.microbatch))
    if stage == last or own is None:
        return own
    behind = done.get((False, stage + 1, work.microbatch))
    return None if behind is None else max(own, behind + transfer)


def _shares(schedule: Schedule, weights: Optional[Sequence[Sequence[float]]]) -> list[list[float]]:
    """The weight of each chunk as a fraction of an average stage's weight."""
    if weights is None:
        return [[1 / schedule.chunks] * schedule.chunks for _ in range(schedule.pp)]
    if len(weights) != schedule.pp or any(len(row) != schedule.chunks for row in weights):
        raise ConfigError(
            f"weights has {[len(row) for row in weights]} chunks per rank, but the schedule has {schedule.pp} ranks of "
            f"{schedule.chunks} chunks."
        )
    total = sum(map(sum, weights))
    if total <= 0 or any(weight < 0 for row in weights for weight in row):
        raise ConfigError("weights must not be negative, and at least one must be above 0.")
    return [[weight * schedule.pp / total for weight in row] for row in weights]
