# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: which tokens a rank holds, and the three ways to attend over the tokens of the others."""

from nemo2.models.layers.attention import SDPAttention
from nemo2.models.layers.chunks import chunks_of, gather_in_order, share_of_rank
from nemo2.models.layers.ring import _homes, ring_attention
from nemo2.report.pictures.svg import Canvas
from tools.explained.kit import ELSEWHERE, LEFT, OF_RANK, SMALL, TOP, box, note, sheet, signed
from tools.explained.traced import group

CP = 4


def holders(cp: int) -> list[int]:
    """The rank of each of a sequence's 2 * cp chunks."""
    held = {chunk.position: rank for rank in range(cp) for chunk in chunks_of([(0, 2 * cp)], cp, rank)}
    return [held[place] for place in range(2 * cp)]


def chunks() -> Canvas:
    """The rank of each block of the causal attention: the same number of blocks on each rank."""
    from megatron.core.utils import get_batch_on_this_cp_rank

    owner = holders(CP)
    canvas = sheet(f"Context parallelism: {len(owner)} chunks on {CP} ranks")
    cell, left, top = 22.0, 58.0, TOP + 34
    canvas.text(left, TOP + 10, "keys, by chunk", size=SMALL)
    canvas.text(LEFT, top + 15, "queries", size=SMALL)
    work = dict.fromkeys(range(CP), 0.0)
    for query, rank in enumerate(owner):
        canvas.text(left + (query + 0.5) * cell, top - 5, query, anchor="middle", size=SMALL)
        canvas.text(left - 4, top + query * cell + 15, query if query else "", anchor="end", size=SMALL)
        for key in range(len(owner)):
            x, y = left + key * cell, top + query * cell
            seen = key <= query
            half = 0.5 if key == query else 1.0
            work[rank] += half * seen
            tip = f"queries of chunk {query}, keys of chunk {key}: " + (f"rank {rank}" if seen else "later, not seen")
            box(
                canvas,
                x,
                y,
                cell - 2,
                cell - 2,
                "½" if key == query else "",
                OF_RANK[rank] if seen else ELSEWHERE,
                tip=tip,
            )
    x = left + len(owner) * cell + 12
    for rank in range(CP):
        y = top + rank * 44
        mine = [number for number, one in enumerate(owner) if one == rank]
        canvas.rect(x, y, 14, 36, OF_RANK[rank], radius=3, outline="edge")
        canvas.text(x + 22, y + 14, f"rank {rank}: chunks {mine[0]}, {mine[1]}", "ink")
        canvas.text(x + 22, y + 31, f"{work[rank]:g} blocks of work", size=SMALL)
    return signed(canvas, top + len(owner) * cell, get_batch_on_this_cp_rank, share_of_rank)


def ring() -> Canvas:
    """Owners of the keys and values on each rank at each step of the ring."""
    canvas = sheet(f'Context parallelism, "p2p": a ring of {CP} ranks')
    left, column, row = 68.0, 86.0, 54.0
    visits = {rank: list(_homes(group(CP, rank))) for rank in range(CP)}
    for step in range(CP):
        canvas.text(left + step * column + 29, TOP + 10, f"step {step}", anchor="middle", size=SMALL)
    for rank, homes in visits.items():
        y = TOP + 20 + rank * row
        canvas.text(LEFT, y + 14, f"rank {rank}", "ink", strong=True)
        canvas.text(LEFT, y + 29, f"queries {rank}", size=SMALL)
        for step, home in enumerate(homes):
            x = left + step * column
            box(canvas, x, y, 58, 34, f"K, V of\nrank {home}", OF_RANK[home], size=SMALL)
            if step + 1 < CP:
                to = next(other for other, seen in visits.items() if seen[step + 1] == home)
                if to > rank:
                    canvas.arrow(x + 58, y + 26, x + column - 1, y + row + 8, "accent")
                else:
                    canvas.arrow(x + 29, y + 35, x + 29, y + 46, "accent")
                    canvas.text(x + 36, y + 46, f"to rank {to}", "accent", size=SMALL)
    y = note(
        canvas,
        TOP + 30 + CP * row,
        "at each step a rank attends with its own queries over the keys that are there, and merges the results by their "
        "log-sum-exp; meanwhile the next keys arrive",
    )
    return signed(canvas, y - 14, ring_attention)


def ways() -> Canvas:
    """Chunks and heads on a rank while it attends, by `cp_comm_type`: chunks from left to right, heads from top to bottom."""
    cp, heads = 2, 4
    owner = holders(cp)
    canvas = sheet(f"Context parallelism: the two other ways, {cp} ranks")
    left, cell, column = 56.0, 20.0, 116.0
    for number, words in enumerate(("a rank's tokens", "all_gather: K and V", "a2a: Q, K and V")):
        canvas.text(left + number * column, TOP + 10, words, "ink", size=SMALL)
    for rank in range(cp):
        y = TOP + 20 + rank * 106
        canvas.text(LEFT, y + 46, f"rank {rank}", "ink", strong=True)
        for number in range(3):
            for head in range(heads):
                for chunk, home in enumerate(owner):
                    # As SDPAttention: all-to-all gives rank r the r-th share of the heads.
                    here = (home == rank, True, head * cp // heads == rank)[number]
                    x = left + number * column + chunk * cell
                    tip = f"chunk {chunk}, head {head}" + ("" if here else " isn't here")
                    fill = OF_RANK[home] if here else ELSEWHERE
                    box(
                        canvas, x, y + head * cell, cell - 2, cell - 2, chunk if here else "", fill, size=SMALL, tip=tip
                    )
        canvas.arrow(left + 4 * cell + 6, y + 42, left + column - 8, y + 42, "accent")
        canvas.text(left + 1.5 * column + 2 * cell - 2, y + 46, "or", "ink", anchor="middle")
    y = note(
        canvas,
        TOP + 30 + cp * 106,
        "columns: chunks of the sequence; rows: heads. Keys and values are gathered for all heads, or heads are exchanged for "
        "tokens, and back after the attention",
    )
    return signed(canvas, y - 14, gather_in_order, SDPAttention)
