# SPDX-License-Identifier: Apache-2.0
"""A rehearsal as one HTML page: memory as stacked bars, the pipeline's timeline, and the tables."""

from collections.abc import Sequence

from nemo2.base.gpus import GIB, OUTSIDE_TORCH
from nemo2.mcore.parallel.pipeline_schedule import Schedule, Timeline, timeline
from nemo2.preflight.rehearse.counts import MemoryCount, RankRehearsal, Rehearsal
from nemo2.preflight.rehearse.text import flop_rows, message_rows, verdict_lines
from nemo2.report.pictures.bars_and_points import Bar, Limit, stacked_bars
from nemo2.report.pictures.page import cards, figure, page, paragraph, section, table
from nemo2.report.pictures.pipeline import draw_timeline
from nemo2.report.pictures.svg import Canvas


def render_page(rehearsal: Rehearsal) -> str:
    """The page as text."""
    r, v = rehearsal, rehearsal.verdict
    reserved = f"{v.capacity / GIB:.1f} less {v.reserve / GIB:.1f} kept free"
    usable = f"usable: {reserved if v.headroom else 'all of it'}"
    glance = [
        (v.answer, f"on {v.gpu}"),
        (f"{v.needed / GIB:.1f} GiB", f"needed on the {v.fullest}"),
        (f"{(v.capacity - v.reserve) / GIB:.1f} GiB", usable),
        (v.largest_term, "largest term"),
        (str(r.num_gpus), "GPUs"),
    ]
    kernels = ["kernel", "phase", *(f"{rank.kind}, TFLOP" for rank in r.ranks)]
    assumptions = [f"{note[:1].upper()}{note[1:]}." for note in r.notes]
    return page(
        f"Rehearsal of {r.recipe or 'a recipe'}",
        cards(glance),
        *(paragraph(line) for line in verdict_lines(v)[1:]),  # the cards show the first line
        section("Memory", figure(memory_picture(r).render(), "GiB on one GPU of each kind of rank, at the peak")),
        *_pipeline(r),
        section("Messages of one step", _messages(r.ranks)),
        section("Arithmetic of one step", table(kernels, [[*key, *row] for key, row in flop_rows(r.ranks)])),
        *([section("Assumptions", *map(paragraph, assumptions))] if assumptions else []),
        subtitle=f"{r.num_gpus} x {r.gpu}, {r.layout}, sequence {r.seq_length}, micro-batch {r.micro_batch_size}, global batch "
        f"{r.global_batch_size}",
    )


def memory_picture(rehearsal: Rehearsal) -> Canvas:
    """A bar per kind of rank against the GPU's memory."""
    v = rehearsal.verdict
    capacity, reserve, outside = (size / GIB for size in (v.capacity, v.reserve, OUTSIDE_TORCH))
    bars = [
        Bar(
            name=rank.kind,
            parts={name: size / GIB for name, size in _parts(rank.memory).items()} | {"outside torch": outside},
            note=f"rank {rank.rank}: {rank.memory.total / GIB:.2f} GiB",
        )
        for rank in rehearsal.ranks
    ]
    usable = f"{capacity - reserve:.1f} GiB usable of the {v.gpu}'s {capacity:.1f}"
    return stacked_bars(
        "Memory by kind of rank",
        bars,
        unit="GiB",
        limit=Limit(name=usable if reserve else f"{v.gpu}: {capacity:.1f} GiB", value=capacity, kept_free=reserve),
        text=lambda value: f"{value:.1f} GiB",
    )


def _parts(memory: MemoryCount) -> dict[str, int]:
    """The terms in one order for all bars, with small terms combined, so that no two share a color."""
    terms = memory.terms()
    large = ("parameters", "gradients", "main parameters", "optimizer states", "activations", "logits")
    large += ("teacher",) if memory.teacher else ()
    return {name: terms.pop(name) for name in large} | {"messages, buffers, working memory": sum(terms.values())}


def _pipeline(rehearsal: Rehearsal) -> list[str]:
    """The pipeline's timeline over all stages. Empty without a pipeline."""
    whole, legible = rehearsal.schedule, rehearsal.schedule.legible
    if whole.pp == 1:
        return []
    shown = (
        "" if legible == whole else f"the first {legible.num_microbatches} of {whole.num_microbatches} micro-batches"
    )
    drawn, measured = (played(rehearsal, one) for one in (legible, whole))
    picture = draw_timeline(drawn, note=shown, measured=measured, unit="TFLOP")
    basis = (
        "A pass is as long as its matrix products and attention, and messages take no time. `nemo2 plan` predicts the time of "
        "a step."
    )
    return [section("Pipeline", figure(picture.render(), "Passes of each pipeline stage"), paragraph(basis))]


def played(rehearsal: Rehearsal, schedule: Schedule) -> Timeline:
    """The passes of all stages in the order of ``schedule``, over the TFLOP of a pass. All stages have one ratio of forward to
    backward."""
    by_stage = {rank.stage: rank for rank in rehearsal.ranks}
    ranks = [by_stage.get(stage) or rehearsal.rank("middle stage") for stage in range(schedule.pp)]
    forward, backward = (
        sum(flop.flops for rank in ranks for flop in rank.flops if flop.phase == phase)
        for phase in ("forward", "backward")
    )
    passes = schedule.pp * rehearsal.schedule.num_microbatches * 1e12
    return timeline(schedule, forward=forward / passes, backward=backward / passes, weights=_weights(ranks))


def _weights(ranks: Sequence[RankRehearsal]) -> list[list[float]]:
    """The arithmetic of each chunk by its layers. A stage's arithmetic beyond its layers counts for the last chunk, which has
    the loss on the last stage. On the first stage it counts for the first chunk, which has the embedding."""
    whole = [sum(flop.flops for flop in rank.flops) for rank in ranks]
    per_layer = min(flops / max(1, sum(rank.layers)) for rank, flops in zip(ranks, whole, strict=True))
    weights = [[count * per_layer for count in rank.layers] for rank in ranks]
    for index, (row, flops) in enumerate(zip(weights, whole, strict=True)):
        row[0 if index == 0 else -1] += max(0.0, flops - sum(row))
    return weights


def _messages(ranks: tuple[RankRehearsal, ...]) -> str:
    """A row for each kind of collective over a kind of group, a column for each kind of rank. Less than half a MiB is
    left out."""
    rows = [
        [*key, *(f"{moved / GIB:,.3f} in {calls:,.0f}" if moved >= 2**19 else "" for moved, calls in counts)]
        for key, counts in message_rows(ranks)
        if any(moved >= 2**19 for moved, _ in counts)
    ]
    return table(["collective", "over", "ranks", *(f"{rank.kind}, GiB in calls" for rank in ranks)], rows)
