# SPDX-License-Identifier: Apache-2.0
"""Draws a pipeline's timeline: the passes of each rank in warm-up, steady state and drain, and its idle time."""

from typing import Optional

from nemo2.mcore.parallel.pipeline_schedule import Slot, Timeline
from nemo2.report.pictures.svg import Canvas, legend, nice_ticks, text_width, tick_text

_LEFT, _RIGHT, _TOP, _ROW, _CELL, _STRIP = 66, 130, 66, 36, 24, 4
PHASES = {"warm-up": "accent", "steady": "soft", "drain": "ink"}


def draw_timeline(
    timeline: Timeline, *, title: str = "", note: str = "", unit: str = "time", measured: Optional[Timeline] = None
) -> Canvas:
    """The timeline with one row per pipeline rank.

    Passes show the number of their micro-batch if there is room. The strip below a row shows the rank's phase. Empty cells
    are the bubble.

    Args:
        timeline: A timeline of `nemo2.mcore.parallel.pipeline_schedule`.
        title: The title. "": the schedule's name and sizes.
        note: A second line below the title.
        unit: The unit of the axis.
        measured: The timeline whose idle time and activations are written at the ends of the rows, such as the whole step
            if ``timeline`` is its first part. None: ``timeline``.
    """
    measured = measured or timeline
    schedule = measured.schedule
    title = title or (
        f"{schedule.name}: {schedule.pp} stages, {schedule.num_microbatches} micro-batches, "
        f"{measured.bubble_fraction:.1%} bubble"
    )
    bottom = _TOP + _ROW * schedule.pp
    canvas = Canvas(1040, bottom + 40, title=title, description=note)
    canvas.text(8, 16, title, "ink", size=14, strong=True)
    canvas.text(8, 34, note)
    _legend(canvas, timeline)
    across = (canvas.width - _LEFT - _RIGHT) / timeline.span
    style = _Style(timeline, across)
    for rank, row in enumerate(timeline.slots):
        y = _TOP + rank * _ROW
        canvas.text(_LEFT - 8, y + 17, f"stage {rank}", "ink", anchor="end")
        canvas.rect(_LEFT, y, timeline.span * across, _CELL, "card")
        for slot in row:
            style.draw(canvas, slot, _LEFT + slot.start * across, y, (slot.end - slot.start) * across)
        draw_phases(canvas, row, y + _CELL + 2, _LEFT, across)
        idle = measured.idle_fraction(rank)
        tip = f"stage {rank} waits {idle:.1%} of the time and holds at most {measured.in_flight(rank)} activations"
        canvas.text(
            _LEFT + timeline.span * across + 8,
            y + 16,
            f"{idle:.1%} idle, holds {measured.in_flight(rank)}",
            tip=tip,
        )
    for tick in nice_ticks(0, timeline.span, whole=True, count=10):
        x = _LEFT + tick * across
        canvas.line(x, bottom + 2, x, bottom + 7, "soft")
        canvas.text(x, bottom + 20, tick_text(tick), anchor="middle", size=11)
    canvas.text(8, bottom + 20, unit)
    return canvas


def _legend(canvas: Canvas, timeline: Timeline) -> None:
    entries = [("c0", "forward"), ("c1", "backward")]
    if timeline.schedule.interleaved:
        entries += [("c0*", "forward, odd chunk"), ("c1*", "backward, odd chunk")]
    phases = {slot.work.phase for row in timeline.slots for slot in row}
    entries += [("card", "waits"), *((PHASES[name], name) for name in PHASES if name in phases)]
    needed = sum(17 + text_width(words) for _, words in entries)
    legend(canvas, 8, 54, entries, gap=min(18, (canvas.width - 16 - needed) / (len(entries) - 1)))


class _Style:
    """The style of all passes in a picture. Passes of one kind all have numbers and outlines, or none has."""

    def __init__(self, timeline: Timeline, across: float) -> None:
        self._interleaved = timeline.schedule.interleaved
        widest = text_width(str(timeline.schedule.num_microbatches - 1), 11)
        slots = [slot for row in timeline.slots for slot in row if slot.end > slot.start]
        narrowest = {
            forward: across * min((s.end - s.start for s in slots if s.work.forward == forward), default=0)
            for forward in (True, False)
        }
        self._outlined = min(narrowest.values()) >= 4
        self._numbered = {forward: width >= widest + 2 for forward, width in narrowest.items()}

    def draw(self, canvas: Canvas, slot: Slot, x: float, y: float, width: float) -> None:
        if width <= 0:
            return
        work = slot.work
        chunk = f", chunk {work.chunk}" if self._interleaved else ""
        kind = "forward" if work.forward else "backward"
        tip = f"{kind} of micro-batch {work.microbatch}{chunk} ({work.phase}), {slot.start:.4g} to {slot.end:.4g}"
        fill, dark = "c0" if work.forward else "c1", work.chunk % 2 == 1
        if self._outlined:
            canvas.rect(x, y, width, _CELL, fill, tip=tip, outline="edge", dark=dark)
        else:
            canvas.rect(x, y, max(width - 0.6, width * 0.7), _CELL, fill, tip=tip, dark=dark)
        if self._numbered[work.forward]:
            canvas.text(x + width / 2, y + 16, work.microbatch, "ink", anchor="middle", size=11, tip=tip)


def draw_phases(canvas: Canvas, row: tuple[Slot, ...], y: float, zero: float, across: float) -> None:
    """Draw a strip for each phase, from its first pass to its last."""
    for phase, fill in PHASES.items():
        slots = [slot for slot in row if slot.work.phase == phase]
        if slots:
            start, end = slots[0].start, slots[-1].end
            tip = f"{phase}: {len(slots)} passes, {start:.4g} to {end:.4g}"
            canvas.rect(zero + start * across, y, (end - start) * across, _STRIP, fill, tip=tip)
