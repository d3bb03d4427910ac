# SPDX-License-Identifier: Apache-2.0
"""A rehearsal as one HTML page: memory as stacked bars, what each rank does when, and the tables."""

from pathlib import Path

from nemo2.pictures import Bar, Limit, page, stacked_bars
from nemo2.pictures.page import cards, figure, paragraph, section, table
from nemo2.pictures.pipeline import draw_timeline
from nemo2.rehearse.counts import RankRehearsal, Rehearsal
from nemo2.rehearse.text import GIB, verdict_lines


def write_page(rehearsal: Rehearsal, path: Path) -> Path:
    """Write the page there, in place of what was; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render_page(rehearsal), encoding="utf-8")
    return path


def render_page(rehearsal: Rehearsal) -> str:
    """The page as text."""
    r, v = rehearsal, rehearsal.verdict
    glance = [
        ("fits" if v.fits else "does not fit", f"on {v.gpu}"),
        (f"{v.needed / GIB:.1f} GiB", f"needed, of {v.capacity / GIB:.1f} GiB"),
        (v.largest_term, "largest term"),
        (str(r.num_gpus), "GPUs"),
    ]
    return page(
        f"Rehearsal of {r.recipe or 'a recipe'}",
        cards(glance),
        *(paragraph(line) for line in verdict_lines(v)),
        section("Memory", figure(memory_picture(r).render(), "GiB on one GPU of each kind, at the fullest moment")),
        *_timeline(r),
        section("Messages of one step", _messages(r.ranks)),
        section("Arithmetic of one step", _arithmetic(r.ranks)),
        *([section("Taken for granted", *(paragraph(note) for note in r.notes))] if r.notes else []),
        subtitle=f"{r.num_gpus} x {r.gpu}, {r.layout}, sequence {r.seq_length}, micro-batch {r.micro_batch_size}, global batch "
        f"{r.global_batch_size}",
    )


def memory_picture(rehearsal: Rehearsal):
    """One bar per kind of rank against the GPU's memory."""
    v = rehearsal.verdict
    bars = [
        Bar(
            name=rank.kind,
            parts={
                **{name: size / GIB for name, size in rank.memory.terms().items() if size >= 0.005 * GIB},
                "outside of torch": v.outside_torch / GIB,
            },
            note=f"rank {rank.rank}: {rank.memory.total / GIB:.2f} GiB",
        )
        for rank in rehearsal.ranks
    ]
    return stacked_bars(
        "Memory by kind of rank",
        bars,
        unit="GiB",
        limit=Limit(name=v.gpu, value=v.capacity / GIB),
        text=lambda value: f"{value:.1f} GiB",
    )


def _timeline(rehearsal: Rehearsal) -> list[str]:
    """The pipeline's schedule over all stages, from Megatron-Core's own tables; nothing without a pipeline."""
    sizes = rehearsal.sizes
    stages = sizes["pp"] or 1
    if stages == 1:
        return []
    from nemo2.parallel.schedule import Schedule, timeline

    microbatches = rehearsal.ranks[0].num_microbatches
    shown = min(microbatches, 4 * stages)
    schedule = Schedule(pp=stages, vp=sizes["vp"] or 1, num_microbatches=shown)
    note = "" if shown == microbatches else f"the first {shown} of {microbatches} micro-batches"
    return [section("Pipeline", figure(draw_timeline(timeline(schedule), note=note).render(), "Who does what when"))]


def _messages(ranks: tuple[RankRehearsal, ...]) -> str:
    rows = [
        [rank.kind, c.kind, c.group, str(c.ranks), f"{c.calls:,.0f}", f"{c.bytes / GIB:,.3f}"]
        for rank in ranks
        for c in rank.collectives
    ]
    return table(["rank", "collective", "group", "ranks", "calls", "GiB"], rows)


def _arithmetic(ranks: tuple[RankRehearsal, ...]) -> str:
    rows = [[rank.kind, c.kind, c.phase, f"{c.flops / 1e12:,.2f}"] for rank in ranks for c in rank.flops]
    return table(["rank", "kernel", "phase", "TFLOP"], rows)
