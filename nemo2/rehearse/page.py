# SPDX-License-Identifier: Apache-2.0
"""A rehearsal as one HTML page: memory as stacked bars, the pipeline's timeline, and the tables."""

from typing import Optional

from nemo2.pictures import Bar, Limit, page, stacked_bars
from nemo2.pictures.page import cards, figure, paragraph, section, table
from nemo2.pictures.pipeline import Messages, draw_timeline
from nemo2.rehearse.counts import CollectiveCount, MemoryCount, RankRehearsal, Rehearsal, Verdict
from nemo2.rehearse.step_timeline import Rates, step_timeline
from nemo2.rehearse.text import GIB, verdict_lines


def render_page(rehearsal: Rehearsal, rates: Optional[Rates] = None) -> str:
    """The page as text. With ``rates`` the timeline shows the duration of passes and messages at these rates."""
    r, v = rehearsal, rehearsal.verdict
    glance = [
        (v.answer, f"on {v.gpu}"),
        (f"{v.needed / GIB:.1f} GiB", f"needed on the {v.fullest}"),
        (f"{(v.capacity - v.headroom) / GIB:.1f} GiB", _usable(v)),
        (v.largest_term, "largest term"),
        (str(r.num_gpus), "GPUs"),
    ]
    return page(
        f"Rehearsal of {r.recipe or 'a recipe'}",
        cards(glance),
        *(paragraph(line) for line in verdict_lines(v)[1:]),  # the cards show the first line
        section("Memory", figure(memory_picture(r).render(), "GiB on one GPU of each kind of rank, at the peak")),
        *_timeline(r, rates),
        section("Messages of one step", _messages(r.ranks)),
        section("Arithmetic of one step", _arithmetic(r.ranks)),
        *(
            [section("Assumptions", *(paragraph(f"{note[:1].upper()}{note[1:]}.") for note in r.notes))]
            if r.notes
            else []
        ),
        subtitle=f"{r.num_gpus} x {r.gpu}, {r.layout}, sequence {r.seq_length}, micro-batch {r.micro_batch_size}, global batch "
        f"{r.global_batch_size}",
    )


def memory_picture(rehearsal: Rehearsal):
    """A bar per kind of rank against the GPU's memory."""
    v = rehearsal.verdict
    bars = [
        Bar(
            name=rank.kind,
            parts={
                **{name: size / GIB for name, size in _parts(rank.memory).items()},
                "outside torch": v.outside_torch / GIB,
            },
            note=f"rank {rank.rank}: {rank.memory.total / GIB:.2f} GiB",
        )
        for rank in rehearsal.ranks
    ]
    return stacked_bars(
        "Memory by kind of rank",
        bars,
        unit="GiB",
        limit=Limit(name=_limit(v), value=v.capacity / GIB, kept_free=v.headroom / GIB),
        text=lambda value: f"{value:.1f} GiB",
    )


def _usable(verdict: Verdict) -> str:
    """The name of the card with the usable memory."""
    if not verdict.headroom:
        return "usable: all of it"
    return f"usable: {verdict.capacity / GIB:.1f} less {verdict.headroom / GIB:.1f} kept free"


def _limit(verdict: Verdict) -> str:
    if not verdict.headroom:
        return f"{verdict.gpu}: {verdict.capacity / GIB:.1f} GiB"
    usable = (verdict.capacity - verdict.headroom) / GIB
    return f"{usable:.1f} GiB usable of the {verdict.gpu}'s {verdict.capacity / GIB:.1f}"


def _parts(memory: MemoryCount) -> dict[str, int]:
    """The terms in one order for all bars, with small terms combined, so that no two share a color."""
    terms = memory.terms()
    large = ("parameters", "gradients", "main parameters", "optimizer states", "activations", "logits")
    large += ("teacher",) if memory.teacher else ()
    return {name: terms.pop(name) for name in large} | {"messages, buffers, working memory": sum(terms.values())}


def _timeline(rehearsal: Rehearsal, rates: Optional[Rates]) -> list[str]:
    """The pipeline's timeline over all stages, from Megatron-Core's own tables. Empty without a pipeline."""
    step = step_timeline(rehearsal, rates or _PROPORTIONS)
    if step is None:
        return []
    if rates is None:
        picture = draw_timeline(step.timeline, note=step.note)
        return [section("Pipeline", figure(picture.render(), _TIMELINE))]
    messages = Messages(inside=step.inside, transfer=step.transfer, before=step.gather, after=step.reduce)
    picture = draw_timeline(step.timeline, note=step.note, messages=messages, unit="ms")
    told = (
        f"A pass takes the time of its matrix products and attention at {rates.flops / 1e12:,.0f} TFLOP/s. Messages take the "
        f"time of {rates.link / 1e9:,.0f} GB/s inside a machine and {rates.network / 1e9:,.0f} GB/s between machines. The "
        "timeline shows no overlap of messages with computation, so an overlapped step is shorter. `nemo2 plan` predicts the "
        "time of a step."
    )
    return [section("Pipeline", figure(picture.render(), _TIMELINE), paragraph(told))]


_TIMELINE = "Passes of each pipeline stage over time"
_PROPORTIONS = Rates(flops=1e15, link=float("inf"), network=float("inf"))
"""Rates at which a pass takes the time of its arithmetic, and messages take no time."""


def _messages(ranks: tuple[RankRehearsal, ...]) -> str:
    """A row for each kind of collective over a kind of group, a column for each kind of rank."""
    found = {
        (c.kind, c.group, c.ranks): [_moved(rank, c) for rank in ranks] for rank in ranks for c in rank.collectives
    }
    rows = [
        [kind, group, size, *(moved or "" for moved in row)] for (kind, group, size), row in found.items() if any(row)
    ]
    return table(["collective", "over", "ranks", *(f"{rank.kind}, GiB in calls" for rank in ranks)], rows)


def _moved(rank: RankRehearsal, like: CollectiveCount) -> str:
    """The GiB and calls of one step. Empty for less than half a MiB."""
    same = [c for c in rank.collectives if (c.kind, c.group, c.ranks) == (like.kind, like.group, like.ranks)]
    size, calls = sum(c.bytes for c in same), sum(c.calls for c in same)
    return f"{size / GIB:,.3f} in {calls:,.0f}" if size >= 2**19 else ""


def _arithmetic(ranks: tuple[RankRehearsal, ...]) -> str:
    found = dict.fromkeys((c.kind, c.phase) for rank in ranks for c in rank.flops)
    rows = [
        [
            kind,
            phase,
            *(sum(c.flops for c in rank.flops if (c.kind, c.phase) == (kind, phase)) / 1e12 for rank in ranks),
        ]
        for kind, phase in found
    ]
    return table(["kernel", "phase", *(f"{rank.kind}, TFLOP" for rank in ranks)], rows)
