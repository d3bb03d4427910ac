# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism: what travels between stages, interleaved chunks, and messages that a rank doesn't wait for."""

from nemo2.mcore.parallel.layout import Layout
from nemo2.mcore.parallel.pipeline_schedule import Schedule, Slot, Timeline, timeline
from nemo2.report.pictures.pipeline import PHASES, draw_phases
from nemo2.report.pictures.ranks import stages_of
from nemo2.report.pictures.svg import Canvas, legend, text_width
from tools.explained.kit import (
    BACKWARD,
    COMMUNICATION,
    ELSEWHERE,
    FORWARD,
    LEFT,
    OF_RANK,
    SMALL,
    TOP,
    WIDTH,
    box,
    note,
    sheet,
    signed,
)

_HIGH, _FROM = 24.0, 58.0
_TRANSFER = 0.25


def travel() -> Canvas:
    """Activations go down to the last stage, gradients come back up."""
    from megatron.core.parallel_state import is_pipeline_first_stage, is_pipeline_last_stage
    from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_without_interleaving

    schedule = Schedule(pp=3, num_microbatches=4)
    played = timeline(schedule, transfer=0.6)
    stages = stages_of(Layout(pp=schedule.pp), num_layers=6)
    canvas = sheet(f"Pipeline parallelism: {schedule.pp} stages, {schedule.num_microbatches} micro-batches")
    row, top = 58.0, TOP + 26
    legend(canvas, LEFT, TOP + 10, [(FORWARD, "forward"), (BACKWARD, "backward"), (ELSEWHERE, "waits")])
    across = _rows(canvas, played, top, row, until=played.span)
    for slot, stage, other, to in _messages(played):
        down = to > stage
        y1, y2 = (top + stage * row + _HIGH, top + to * row) if down else (top + stage * row, top + to * row + _HIGH)
        tone = "soft" if down else "accent"
        canvas.arrow(_FROM + slot.end * across, y1, _FROM + other.start * across + 2, y2, tone)
    words = "numbers: micro-batches; grey arrows: activations; blue: gradients"
    y = note(canvas, top + schedule.pp * row - 14, words)
    for stage, (chunk,) in enumerate(stages):
        end = f" ({is_pipeline_first_stage.__name__})" if chunk.embedding else ""
        end = f" ({is_pipeline_last_stage.__name__})" if chunk.loss else end
        canvas.text(LEFT, y + 2, f"stage {stage}: {chunk.describe()}{end}", "ink", size=SMALL)
        y += 16
    return signed(
        canvas,
        y - 14,
        is_pipeline_first_stage,
        is_pipeline_last_stage,
        forward_backward_pipelining_without_interleaving,
    )


def interleaving() -> Canvas:
    """Two chunks per rank: the same work in smaller pieces, so that less of it is waited for."""
    from megatron.core.pipeline_parallel.schedules import (
        forward_backward_pipelining_with_interleaving,
        get_schedule_table,
    )

    plain = Schedule(pp=2, num_microbatches=4)
    layout = Layout(pp=2, vp=2)
    whole, halves = timeline(plain), timeline(Schedule(pp=2, num_microbatches=4, vp=layout.vp))
    canvas = sheet(f"Interleaving: {layout.pp} stages, {layout.vp} chunks each")
    y = TOP + 4
    for words, cut, played in (
        ("1F1B", Layout(pp=2), whole),
        ("interleaved 1F1B", layout, halves),
    ):
        canvas.text(LEFT, y + 10, f"{words}: {played.bubble_fraction:.1%} bubble", "ink", strong=True)
        y = _layers(canvas, cut, y + 20) + 12
        _rows(canvas, played, y, 32.0, until=whole.span)
        y += 2 * 32 + 8
    legend(canvas, LEFT, y + 8, [(FORWARD, "forward"), (BACKWARD, "backward"), (ELSEWHERE, "waits")])
    y = note(canvas, y + 28, "numbers: micro-batches; darker: the stage's second chunk")
    return signed(canvas, y - 14, forward_backward_pipelining_with_interleaving, get_schedule_table)


def schedules() -> Canvas:
    """The three orders of work on one scale."""
    played = [
        timeline(Schedule(pp=4, num_microbatches=8, all_forward_first=True)),
        timeline(Schedule(pp=4, num_microbatches=8)),
        timeline(Schedule(pp=4, num_microbatches=8, vp=2)),
    ]
    return _compared("Pipeline schedules: 4 stages, 8 micro-batches", [(one.schedule.name, one) for one in played])


def uneven() -> Canvas:
    """The cost of a heavier last stage, and the gain of taking layers off it."""
    schedule = Schedule(pp=4, num_microbatches=8)
    heavy = timeline(schedule, weights=[[8.0], [8.0], [8.0], [10.0]])
    lighter = timeline(schedule, weights=[[9.0], [8.0], [8.0], [9.0]])
    named = [("32 layers split evenly", heavy), ("a layer moved from last to first", lighter)]
    return _compared("An output layer worth two layers, on the last stage", named)


def overlap() -> Canvas:
    """An interleaved step twice: ranks wait for messages, and messages overlap the passes."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    schedule = Schedule(pp=2, num_microbatches=4, vp=2)
    waited = timeline(schedule, transfer=_TRANSFER, sender_waits=True)
    hidden = timeline(schedule, transfer=_TRANSFER)
    canvas = sheet("Pipeline messages beside the passes")
    y = TOP + 4
    for words, played in (("overlap_p2p_comm=False", waited), ("overlap_p2p_comm=True", hidden)):
        canvas.text(LEFT, y + 10, f"{words}: {played.span:g} forward passes", "ink", strong=True)
        y += 20
        across = _rows(canvas, played, y, 40.0, until=waited.span)
        for slot, stage, _, to in _messages(played):
            x = _FROM + slot.end * across
            below = y + stage * 40 + _HIGH + 1
            canvas.rect(x, below, _TRANSFER * across, 6, COMMUNICATION, tip=f"to stage {to}")
        y += 2 * 40 + 10
    legend(
        canvas,
        LEFT,
        y + 8,
        [(FORWARD, "forward"), (BACKWARD, "backward"), (COMMUNICATION, "message"), (ELSEWHERE, "waits")],
    )
    y = note(
        canvas,
        y + 28,
        f"a message takes {_TRANSFER:g} of a stage's forward pass here; numbers: micro-batches; darker: the rank's second chunk",
    )
    return signed(canvas, y - 14, P2PCommunicator)


def _compared(title: str, named: list[tuple[str, Timeline]]) -> Canvas:
    """Timelines on one scale, each with its bubble and its phases."""
    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

    canvas, y, row = sheet(title), TOP + 4, 33.0
    until = max(played.span for _, played in named)
    for name, played in named:
        canvas.text(LEFT, y + 10, f"{name}: {played.bubble_fraction:.1%} bubble", "ink", strong=True)
        y += 20
        across = _rows(canvas, played, y, row, until=until)
        for stage, slots in enumerate(played.slots):
            draw_phases(canvas, slots, y + stage * row + _HIGH + 2, _FROM, across)
        y += len(played.slots) * row + 8
    legend(canvas, LEFT, y + 8, [(FORWARD, "forward"), (BACKWARD, "backward"), (ELSEWHERE, "waits")])
    legend(canvas, LEFT, y + 26, [(fill, phase) for phase, fill in PHASES.items()])
    chunks = any(played.schedule.interleaved for _, played in named)
    words = "numbers: micro-batches" + (", where they fit; darker: a stage's second chunk" if chunks else "")
    y = note(canvas, y + 46, words)
    return signed(canvas, y - 14, get_pp_rank_microbatches, get_schedule_table)


def _rows(canvas: Canvas, played: Timeline, top: float, row: float, *, until: float) -> float:
    """The passes of each stage; returns how many pixels a unit of time is."""
    across = (WIDTH - LEFT - _FROM) / until
    for stage, slots in enumerate(played.slots):
        y = top + stage * row
        canvas.text(LEFT, y + 16, f"stage {stage}", "ink", size=SMALL)
        canvas.rect(_FROM, y, played.span * across, _HIGH, ELSEWHERE)
        for slot in slots:
            kind = "forward" if slot.work.forward else "backward"
            canvas.rect(
                _FROM + slot.start * across,
                y,
                (slot.end - slot.start) * across,
                _HIGH,
                FORWARD if slot.work.forward else BACKWARD,
                outline="edge",
                dark=slot.work.chunk % 2 == 1,
                tip=f"{kind} of micro-batch {slot.work.microbatch}, chunk {slot.work.chunk}",
            )
            if (slot.end - slot.start) * across >= text_width(str(slot.work.microbatch), SMALL) + 1.5:
                middle = _FROM + (slot.start + slot.end) / 2 * across
                canvas.text(middle, y + 16, slot.work.microbatch, "ink", anchor="middle", size=SMALL)
    return across


def _messages(played: Timeline) -> list[tuple[Slot, int, Slot, int]]:
    """Each pass whose result travels, its stage, the pass that waits for it, and that pass's stage."""
    schedule = played.schedule
    at = {
        (slot.work.forward, slot.work.chunk * schedule.pp + stage, slot.work.microbatch): (slot, stage)
        for stage, row in enumerate(played.slots)
        for slot in row
    }
    found = []
    for (forward, place, microbatch), (slot, stage) in at.items():
        follower = at.get((forward, place + (1 if forward else -1), microbatch))
        if follower is not None:
            found.append((slot, stage, *follower))
    return found


def _layers(canvas: Canvas, layout: Layout, y: float) -> float:
    """Eight layers in the order a sample meets them, in the colours of their stages."""
    stages = stages_of(layout, num_layers=8)
    cell = (WIDTH - LEFT - _FROM) / 8
    canvas.text(LEFT, y + 15, "layers", "ink", size=SMALL)
    for stage, chunks in enumerate(stages):
        for index, chunk in enumerate(chunks):
            first, last = chunk.layers[0], chunk.layers[-1]
            words, wide = f"{first}-{last}: stage {stage}", (last - first + 1) * cell - 2
            tip = f"layers {first} to {last}: stage {stage}, chunk {index}"
            box(canvas, _FROM + first * cell, y, wide, 20, words, OF_RANK[2 + stage], size=SMALL, tip=tip)
    return y + 22
