# SPDX-License-Identifier: Apache-2.0
"""Pictures for a terminal: a pipeline's timeline and the placement of ranks, as lines of text."""

from itertools import groupby, pairwise

from nemo2.base.columns import columns
from nemo2.base.counts import counted
from nemo2.mcore.parallel.pipeline_schedule import Slot, Timeline
from nemo2.report.pictures.ranks import Placement

_FORWARD, _BACKWARD, _OFF = "\033[30;104m", "\033[30;102m", "\033[0m"


def timeline_text(timeline: Timeline, *, width: int = 100, colour: bool = False) -> str:
    """One line per pipeline rank: ``0>`` is the forward of micro-batch 0, ``<0==`` its backward, ``.`` idle time.

    A letter after the number is the model chunk. Numbers that don't fit into ``width`` characters are omitted.
    """
    schedule = timeline.schedule
    head = max(len(f"stage {rank} ") for rank in range(schedule.pp))
    shortest = min(slot.end - slot.start for row in timeline.slots for slot in row if slot.end > slot.start)
    label = max(len(_label(slot, schedule.interleaved)) for row in timeline.slots for slot in row) + 1
    labelled = timeline.span / shortest * label <= width - head
    scale = label / shortest if labelled else min(1 / shortest, (width - head) / timeline.span)
    lines = []
    for rank, row in enumerate(timeline.slots):
        line, at = "", 0
        for slot in row:
            start, end = round(slot.start * scale), round(slot.end * scale)
            line += "." * (start - at) + _cell(slot, end - start, labelled, schedule.interleaved, colour)
            at = max(end, start)
        line += "." * (round(timeline.span * scale) - at)
        lines.append(f"{f'stage {rank}'.ljust(head)}{line}")
    legend = "0> forward, <0== backward, . waits" if labelled else "> forward, < backward, . waits"
    if schedule.interleaved and labelled:
        legend += ", letters: model chunks"
    return "\n".join([*lines, legend])


def placement_text(placement: Placement) -> str:
    """The stages with their layers and the ranks of the first replica, then the groups of every kind."""
    layout = placement.layout
    title = (
        f"{placement.name or 'layout'}: {counted(placement.world_size, 'rank')} on {counted(placement.nodes, 'node')} "
        f"of {placement.gpus_per_node}: {layout.describe(placement.world_size)}"
    )
    first = placement.replica()
    stages = [
        (str(rank), ranks_text(tuple(first[rank])), "; ".join(_chunks(stage)))
        for rank, stage in enumerate(placement.stages)
    ]
    groups = []
    for kind, name in placement.kinds.items():
        members = placement.groups[kind]
        if len(members[0]) > 1 and (kind != "dp_cp" or layout.cp > 1):
            nodes = placement.nodes_spanned(kind)
            groups.append((name, len(members[0]), f"{len(members):,}", nodes, ranks_text(members[0])))
    parts = [title, "", *columns(stages, head=("stage", "ranks of replica 0", "holds"))]
    if placement.replicas > 1:
        parts.append(f"and {counted(placement.replicas - 1, 'more replica')} of the same")
    if groups:
        parts += ["", *columns(groups, head=("group", "size", "groups", "nodes", "the first one"))]
    return "\n".join(parts)


def ranks_text(ranks: tuple[int, ...]) -> str:
    """The ranks in short notation: ``0-7``, ``0, 8, 16 ... 56``, or a list."""
    steps = {other - one for one, other in pairwise(ranks)}
    if len(ranks) > 2 and steps == {1}:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) <= 4:
        return ", ".join(map(str, ranks))
    if len(steps) == 1:
        return f"{ranks[0]}, {ranks[1]}, {ranks[2]} ... {ranks[-1]}"
    # Ranks that follow each other have the same distance from their places.
    runs = groupby(enumerate(ranks), lambda item: item[1] - item[0])
    texts = [ranks_text(tuple(rank for _, rank in run)) for _, run in runs]
    return " ".join(texts if len(texts) <= 8 else [*texts[:2], "...", texts[-1]])


def _chunks(stage: tuple) -> list[str]:
    described = [chunk.describe() for chunk in stage]
    return described if len(stage) <= 3 else [*described[:2], "...", described[-1]]


def _label(slot: Slot, interleaved: bool) -> str:
    chunk = chr(ord("a") + slot.work.chunk % 26) if interleaved else ""
    return f"{slot.work.microbatch}{chunk}"


def _cell(slot: Slot, length: int, labelled: bool, interleaved: bool, colour: bool) -> str:
    if length <= 0:
        return ""
    label = _label(slot, interleaved) if labelled else ""
    if slot.work.forward:
        text = label.ljust(length - 1) + ">" if labelled else ">" * length
    else:
        text = ("<" + label).ljust(length, "=") if labelled else "<" * length
    return f"{_FORWARD if slot.work.forward else _BACKWARD}{text}{_OFF}" if colour else text
