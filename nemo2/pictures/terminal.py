# SPDX-License-Identifier: Apache-2.0
"""Pictures for a terminal: a pipeline's timeline and the placement of ranks, as lines of text."""

from nemo2.pictures.ranks import GROUP_NAMES, Placement
from nemo2.pictures.schedule import Slot, Timeline

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
        f"{placement.name or 'layout'}: {placement.world_size:,} ranks on {placement.nodes:,} node"
        f"{'s' if placement.nodes > 1 else ''} of {placement.gpus_per_node}: {layout.describe(placement.world_size)}"
    )
    first = placement.replica()
    stages = [("stage", "ranks of replica 0", "holds")]
    for rank, stage in enumerate(placement.stages):
        stages.append((str(rank), ranks_text(tuple(first[rank])), "; ".join(_chunks(stage))))
    groups = [("group", "size", "groups", "nodes", "the first one")]
    for kind, name in GROUP_NAMES.items():
        members = placement.groups[kind]
        if len(members[0]) == 1 or (kind in ("ep", "etp", "expert_dp") and not placement.num_experts):
            continue
        if kind == "dp_cp" and layout.cp == 1:
            continue
        nodes = str(placement.nodes_spanned(kind))
        groups.append((name, str(len(members[0])), f"{len(members):,}", nodes, ranks_text(members[0])))
    parts = [title, "", _columns(stages)]
    if placement.replicas > 1:
        parts.append(f"and {placement.replicas - 1:,} more replica{'s' if placement.replicas > 2 else ''} of the same")
    if len(groups) > 1:
        parts += ["", _columns(groups)]
    return "\n".join(parts)


def ranks_text(ranks: tuple[int, ...]) -> str:
    """The ranks in short notation: ``0-7``, ``0, 8, 16 ... 56``, or a list."""
    if len(ranks) > 2:
        steps = {other - one for one, other in zip(ranks, ranks[1:], strict=False)}
        if steps == {1}:
            return f"{ranks[0]}-{ranks[-1]}"
        if len(ranks) > 4:
            if len(steps) == 1:
                return f"{ranks[0]}, {ranks[1]}, {ranks[2]} ... {ranks[-1]}"
            return " ".join(ranks_text(run) for run in _runs(ranks)) if len(_runs(ranks)) <= 8 else _ends(ranks)
    return ", ".join(map(str, ranks))


def _ends(ranks: tuple[int, ...]) -> str:
    runs = _runs(ranks)
    return f"{ranks_text(runs[0])} {ranks_text(runs[1])} ... {ranks_text(runs[-1])}"


def _runs(ranks: tuple[int, ...]) -> list[tuple[int, ...]]:
    runs: list[list[int]] = [[ranks[0]]]
    for rank in ranks[1:]:
        if rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return [tuple(run) for run in runs]


def _chunks(stage: tuple) -> list[str]:
    if len(stage) <= 3:
        return [chunk.describe() for chunk in stage]
    return [stage[0].describe(), stage[1].describe(), "...", stage[-1].describe()]


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


def _columns(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
