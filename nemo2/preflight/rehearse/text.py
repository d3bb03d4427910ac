# SPDX-License-Identifier: Apache-2.0
"""A rehearsal as text for a terminal."""

from collections.abc import Iterator, Sequence

from nemo2.base.columns import columns, folded
from nemo2.base.gpus import GIB
from nemo2.config.overrides import in_shell
from nemo2.preflight.rehearse.counts import RankRehearsal, Rehearsal, Verdict


def render(rehearsal: Rehearsal) -> str:
    """The job, memory by kind of rank, messages, arithmetic, and the verdict."""
    r = rehearsal
    lines = [
        folded(
            f"{r.recipe or 'recipe'} on {r.num_gpus} x {r.gpu}: {r.layout}, sequence {r.seq_length}, micro-batch "
            f"{r.micro_batch_size}, global batch {r.global_batch_size}"
        ),
        "",
        *memory_table(r.ranks),
        "",
        *messages_table(r.ranks),
        "",
        *flops_table(r.ranks),
        "",
        *map(folded, verdict_lines(r.verdict)),
        *(folded(f"note: {note}") for note in r.notes),
        f"rehearsed in {r.seconds:.1f} s",
    ]
    return "\n".join(lines)


def memory_table(ranks: tuple[RankRehearsal, ...]) -> list[str]:
    """The memory's terms with a column per kind of rank. Activations are listed by part of the model too."""
    rows: list[tuple[str, Sequence[int | str]]] = [
        ("rank", [str(rank.rank) for rank in ranks]),
        ("decoder layers", ["+".join(map(str, rank.layers)) for rank in ranks]),
    ]
    names = list(dict.fromkeys(name for rank in ranks for name in rank.memory.terms()))
    for name in names:
        rows.append((name, [rank.memory.terms()[name] for rank in ranks]))
        if name == "activations":
            parts = dict.fromkeys(part for rank in ranks for part in rank.memory.activations)
            rows += [(f"  {part}", [rank.memory.activations.get(part, 0) for rank in ranks]) for part in parts]
    rows.append(("total", [rank.memory.total for rank in ranks]))
    cells = [(name, [value if isinstance(value, str) else f"{value / GIB:.2f}" for value in row]) for name, row in rows]
    shown = [(name, row) for name, row in cells if name in ("rank", "total") or any(cell != "0.00" for cell in row)]
    return _table("memory, GiB", [rank.kind for rank in ranks], shown)


def messages_table(ranks: tuple[RankRehearsal, ...]) -> list[str]:
    """The collectives of one step, in GiB and calls."""
    rows = [
        (
            f"{kind} over {group} ({size})",
            [f"{moved / GIB:.2f} in {calls:.0f}" if calls else "-" for moved, calls in counts],
        )
        for (kind, group, size), counts in message_rows(ranks)
    ]
    return _table("messages of one step, GiB in calls", [rank.kind for rank in ranks], rows)


def flops_table(ranks: tuple[RankRehearsal, ...]) -> list[str]:
    """The arithmetic of one step, in TFLOP."""
    rows = [(f"{kind}, {phase}", [f"{value:,.1f}" for value in row]) for (kind, phase), row in flop_rows(ranks)]
    return _table("arithmetic of one step, TFLOP", [rank.kind for rank in ranks], rows)


def message_rows(
    ranks: tuple[RankRehearsal, ...],
) -> Iterator[tuple[tuple[str, str, int], list[tuple[float, float]]]]:
    """For each kind of collective over a kind of group of a size: the bytes and the calls on each rank."""
    counts = [{(c.kind, c.group, c.ranks, c.per): (c.bytes, c.calls) for c in rank.collectives} for rank in ranks]
    for key in dict.fromkeys(key[:3] for one in counts for key in one):
        same = [[count.get((*key, per), (0.0, 0.0)) for per in ("microbatch", "step")] for count in counts]
        yield key, [(sum(size for size, _ in both), sum(calls for _, calls in both)) for both in same]


def flop_rows(ranks: tuple[RankRehearsal, ...]) -> Iterator[tuple[tuple[str, str], list[float]]]:
    """For each kind of kernel and phase: the TFLOP on each rank."""
    counts = [{(c.kind, c.phase): c.flops for c in rank.flops} for rank in ranks]
    for key in dict.fromkeys(key for one in counts for key in one):
        yield key, [count.get(key, 0.0) / 1e12 for count in counts]


def verdict_lines(verdict: Verdict) -> list[str]:
    """Whether the job fits, and the change that makes it fit, if one was found."""
    v = verdict
    lines = [f"{v.headline()}; the largest term is {v.largest_term}, on the {v.fullest}"]
    if v.change is not None and v.change_needs is not None:
        lines.append(f"smallest change found: {in_shell(v.change)} ({v.change_needs / GIB:.1f} GiB)")
    return lines


def _table(title: str, kinds: list[str], rows: Sequence[tuple[str, list[str]]]) -> list[str]:
    return columns([(name, *row) for name, row in rows], head=[title, *kinds], right=range(1, len(kinds) + 1))
