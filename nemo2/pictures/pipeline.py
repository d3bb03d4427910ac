# SPDX-License-Identifier: Apache-2.0
"""A pipeline's timeline: what each rank does when, in warm-up, steady state and drain, and where it waits."""

from nemo2.parallel.schedule import Slot, Timeline
from nemo2.pictures.svg import Canvas, legend, nice_ticks, text_width, tick_text

_LEFT, _RIGHT, _TOP, _ROW, _CELL, _STRIP = 66, 118, 66, 36, 24, 4
_PHASES = {"warm-up": "c6", "steady": "c7", "drain": "c4"}


def draw_timeline(
    timeline: Timeline, *, title: str = "", note: str = "", width: int = 1040, until: float | None = None
) -> Canvas:
    """The timeline with one row per pipeline rank.

    Passes carry the number of their micro-batch where there is room for it. The strip below a row says in which phase the rank
    is; what stays empty is the bubble.

    Args:
        timeline: From `nemo2.parallel.schedule`.
        title: None given: the schedule's name and sizes.
        note: A second line below the title.
        width: Of the picture, in pixels.
        until: The time that the right end stands for, so that several pictures share a scale. None: the timeline's end.
    """
    schedule = timeline.schedule
    title = title or (
        f"{schedule.name}: {schedule.pp} stages, {schedule.num_microbatches} micro-batches, "
        f"{timeline.bubble_fraction:.1%} bubble"
    )
    bottom = _TOP + _ROW * schedule.pp
    canvas = Canvas(width, bottom + 40, title=title, description=note)
    canvas.text(8, 16, title, "ink", size=14, strong=True)
    canvas.text(8, 34, note)
    _legend(canvas, timeline)
    end = until or timeline.span
    across = (width - _LEFT - _RIGHT) / end
    style = _Style(timeline, across)
    for rank, row in enumerate(timeline.slots):
        y = _TOP + rank * _ROW
        canvas.text(_LEFT - 8, y + 17, f"stage {rank}", "ink", anchor="end")
        canvas.rect(_LEFT, y, timeline.span * across, _CELL, "card")
        for slot in row:
            style.draw(canvas, slot, _LEFT + slot.start * across, y, (slot.end - slot.start) * across)
        _phases(canvas, row, y + _CELL + 2, across)
        idle = 1 - timeline.busy(rank) / timeline.span
        tip = f"stage {rank} waits {idle:.1%} of the time and holds at most {timeline.in_flight(rank)} activations"
        canvas.text(
            _LEFT + timeline.span * across + 8, y + 16, f"{idle:.0%} idle, holds {timeline.in_flight(rank)}", tip=tip
        )
    for tick in nice_ticks(0, end, whole=True, count=10):
        x = _LEFT + tick * across
        canvas.line(x, bottom + 2, x, bottom + 7, "soft")
        canvas.text(x, bottom + 20, tick_text(tick), anchor="middle", size=11)
    canvas.text(8, bottom + 20, "time")
    return canvas


def _legend(canvas: Canvas, timeline: Timeline) -> None:
    entries = [("c0", "forward"), ("c1", "backward")]
    if timeline.schedule.interleaved:
        entries += [("c0*", "forward, odd chunk"), ("c1*", "backward, odd chunk")]
    phases = {slot.work.phase for row in timeline.slots for slot in row}
    legend(canvas, 8, 54, [*entries, ("card", "waits"), *((_PHASES[name], name) for name in _PHASES if name in phases)])


class _Style:
    """What the passes of one picture have in common: numbers and outlines are there on all or on none of a kind."""

    def __init__(self, timeline: Timeline, across: float) -> None:
        self._interleaved = timeline.schedule.interleaved
        widest = text_width(str(timeline.schedule.num_microbatches - 1), 10)
        slots = [slot for row in timeline.slots for slot in row if slot.end > slot.start]
        narrowest = {
            forward: across * min((s.end - s.start for s in slots if s.work.forward == forward), default=0)
            for forward in (True, False)
        }
        self._outlined = min(narrowest.values()) >= 4
        self._size = {
            forward: 11 if width >= widest * 1.1 + 4 else 9 if width >= widest * 0.9 + 2 else 0
            for forward, width in narrowest.items()
        }

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
        if size := self._size[work.forward]:
            canvas.text(x + width / 2, y + 16, work.microbatch, "ink", anchor="middle", size=size, tip=tip)


def _phases(canvas: Canvas, row: tuple[Slot, ...], y: float, across: float) -> None:
    """One strip per phase, from its first pass to its last."""
    for phase, fill in _PHASES.items():
        slots = [slot for slot in row if slot.work.phase == phase]
        if slots:
            start, end = slots[0].start, slots[-1].end
            tip = f"{phase}: {len(slots)} passes, {start:.4g} to {end:.4g}"
            canvas.rect(_LEFT + start * across, y, (end - start) * across, _STRIP, fill, tip=tip)
