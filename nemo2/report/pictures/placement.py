# SPDX-License-Identifier: Apache-2.0
"""Draws the placement: one replica of the model with its ranks and layers, and the number of replicas.

A world of a thousand ranks consists of identical replicas, so the picture shows one replica or a few, and the number of
all.
"""

from nemo2.base.counts import counted
from nemo2.report.pictures.ranks import Chunk, Placement
from nemo2.report.pictures.svg import COLOURS, Canvas, text_width

_LEFT, _WIDTH, _PER_LINE, _HIGH = 74, 1040, 32, 26.0
_REPLICA_GAP = 14.0

STAGES = COLOURS[2:]
"""The colors of stages, for their layers and ranks. The first two colors are those of passes
(`nemo2.report.pictures.pipeline`)."""


def draw_depth(placement: Placement) -> Canvas:
    """The model from embedding to output, with a tile per layer in the color of the layer's stage."""
    canvas = Canvas(_WIDTH, 0, title=f"{placement.num_layers} layers over {len(placement.stages)} pipeline stages")
    canvas.text(8, 16, canvas.title, "ink", size=14, strong=True)
    chunks = [
        (rank, index, placement.stages[rank][index])
        for index in range(len(placement.stages[0]))
        for rank in range(len(placement.stages))
    ]
    tiles = sum(len(chunk.layers) + chunk.embedding + chunk.loss + chunk.mtp_layers for _, _, chunk in chunks)
    gap = 5.0 if len(chunks) <= 60 else 2.0
    tile = min(26.0, (_WIDTH - 16 - gap * (len(chunks) - 1)) / max(tiles, 1))
    numbered = tile >= text_width(str(placement.num_layers - 1), 11) + 5
    x, y = 8.0, 30.0
    for rank, index, chunk in chunks:
        fill = STAGES[rank % len(STAGES)]
        where = f"stage {rank}" + (f", chunk {index}" if len(placement.stages[0]) > 1 else "")
        pieces = _tiles(chunk, ranges=not numbered)
        start = x
        for label, words, size in pieces:
            canvas.rect(x, y, size * tile, 24, fill, tip=f"{where}: {words}", outline="edge" if size * tile > 4 else "")
            if size * tile >= text_width(label, 11) + 1:
                canvas.text(x + size * tile / 2, y + 16, label, "ink", anchor="middle", size=11)
            x += size * tile
        if x - start >= text_width(str(rank), 11):
            canvas.text((start + x) / 2, y + 39, rank, anchor="middle", size=11, tip=f"{where}: {chunk.describe()}")
        x += gap
    words = "layers, with their stage below; a color is a stage; E: embedding, O: output layer and loss"
    has_mtp = any(chunk.mtp_layers for _, _, chunk in chunks)
    canvas.text(8, y + 58, f"{words}, M: multi-token prediction" if has_mtp else words, size=11)
    canvas.height = y + 66
    return canvas


def draw_ranks(placement: Placement) -> Canvas:
    """The ranks of one or more replicas by stage. Frames are nodes, and the ranks of a tensor-parallel group are adjacent.

    A replica wider than about 32 ranks is broken into lines. Otherwise as many replicas are drawn as fit.
    """
    layout, columns = placement.layout, len(placement.replica()[0])
    held = [_held(stage) for stage in placement.stages]
    side = min(250.0, max(text_width(words) for words in held) + 16)
    tp_gap = 8.0 if layout.tp > 1 else 2.0
    room = _WIDTH - _LEFT - side
    numbered = text_width(str(placement.world_size - 1), 11) + 3
    # Whole tensor-parallel groups, and no more than leave room for the longest number in each cell.
    fitting = int((room - _REPLICA_GAP) / (numbered + tp_gap / layout.tp))
    per_line = min(columns, max(min(_PER_LINE, fitting) // layout.tp, 1) * layout.tp)
    lines = -(-columns // per_line)
    gaps = -(-per_line // layout.tp) * tp_gap + _REPLICA_GAP
    # As many replicas as leave room for the longest number in a cell and a heading above each.
    needed = max(per_line * numbered + gaps, text_width("replica 00", 11) + 6)
    shown = max(1, min(placement.replicas, int(room // needed)))
    replicas = [placement.replica(index) for index in range(shown)]
    cell = min(44.0, (room / shown - gaps) / per_line)
    replica_width = max(per_line * cell + gaps, text_width("replica 00", 11) + 6 if shown > 1 else 0)
    row_height = lines * (_HIGH + 8) + 10
    canvas = Canvas(_WIDTH, 0, title=_title(placement, shown, columns * len(placement.stages)))
    canvas.text(8, 16, canvas.title, "ink", size=14, strong=True)
    canvas.text(8, 34, _how_to_read(placement))
    top = 50.0
    if shown > 1:
        top += 14
        for index in range(shown):
            canvas.text(_LEFT + index * replica_width, top - 10, f"replica {index}", size=11)
    for stage, words in enumerate(held):
        y = top + stage * row_height
        canvas.text(_LEFT - 8, y + 17, f"stage {stage}", "ink", anchor="end", tip=words)
        for line in range(lines):
            spots = [
                (
                    rank,
                    _LEFT + index * replica_width + column * cell + (column // layout.tp) * tp_gap,
                    y + line * (_HIGH + 8),
                )
                for index, replica in enumerate(replicas)
                for column, rank in enumerate(replica[stage][line * per_line : (line + 1) * per_line])
            ]
            _frames(canvas, placement, spots, cell)
            for rank, x, cell_y in spots:
                _rank(canvas, placement, rank, x, cell_y, cell)
        canvas.text(_LEFT + shown * replica_width - _REPLICA_GAP + 6, y + 17, _shorten(words, side), tip=words)
    canvas.height = top + len(held) * row_height
    return canvas


def draw_experts(placement: Placement) -> Canvas:
    """The ranks of the first stage's first expert-parallel group, with the experts of each MoE layer that they hold."""
    group = placement.group_of("ep", 0)
    ranks = [rank for member in group for rank in placement.group_of("etp", member)]
    nodes = placement.nodes_spanned("ep")
    shards = placement.layout.expert_tensor_size
    title = (
        f"{placement.num_experts} experts over {len(group)} ranks{f', each sharded over {shards}' * (shards > 1)}; "
        f"{len(placement.groups['ep'])} such groups, each over {nodes} node{'s' * (nodes > 1)}"
    )
    canvas = Canvas(_WIDTH, 0, title=title)
    canvas.text(8, 16, title, "ink", size=14, strong=True)
    per_line, y = 16, 30.0
    cell = (_WIDTH - 16) / per_line
    for number, rank in enumerate(ranks):
        x = 8 + (number % per_line) * cell
        y = 30 + (number // per_line) * 42
        dark = number // shards % 2 == 1
        experts = placement.experts_of(rank)
        fill = _fill(placement, rank)
        canvas.rect(x, y, cell - 3, 36, fill, radius=3, tip=describe_rank(placement, rank), dark=dark)
        canvas.text(x + cell / 2 - 1, y + 15, f"rank {rank}", "ink", anchor="middle", size=11)
        canvas.text(x + cell / 2 - 1, y + 29, _span(experts), "ink", anchor="middle", size=11)
    canvas.height = y + 46
    return canvas


def describe_rank(placement: Placement, rank: int) -> str:
    """Position and contents of a rank, one line each."""
    layout = placement.layout
    stage = placement.index_in("pp", rank)
    sizes = {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "dp": placement.replicas}
    if placement.num_experts:
        sizes |= {"ep": layout.ep, "etp": layout.expert_tensor_size}
    places = ", ".join(f"{kind} {placement.index_in(kind, rank)} of {size}" for kind, size in sizes.items() if size > 1)
    lines = [f"rank {rank} on node {placement.node_of(rank)}" + (f": {places}" if places else "")]
    chunks = placement.stages[stage]
    lines.append("; ".join(chunk.describe() for chunk in chunks))
    if experts := placement.experts_of(rank):
        lines.append(f"experts {_span(experts)} of each MoE layer")
    return "\n".join(lines)


def _how_to_read(placement: Placement) -> str:
    layout, parts = placement.layout, []
    if layout.tp > 1:
        parts.append(f"adjacent cells: a tensor-parallel group of {layout.tp}")
    if layout.cp > 1:
        parts.append(f"light and dark in turn: the {layout.cp} context-parallel shards of a sequence")
    parts.append(f"frames: the ranks of a node with {placement.gpus_per_node} GPUs")
    return "; ".join(parts)


def _title(placement: Placement, shown: int, per_replica: int) -> str:
    ranks = f"{shown * per_replica:,} of {placement.world_size:,} ranks"
    if placement.replicas == 1:
        words = f"all {counted(placement.world_size, 'rank')}, one replica"
    elif shown == placement.replicas:
        words = f"all {shown} replicas, {placement.world_size:,} ranks"
    else:
        words = f"{shown if shown > 1 else 'one'} of {placement.replicas:,} replicas, {ranks}"
    return f"{placement.name}: {words}" if placement.name else words


def _rank(canvas: Canvas, placement: Placement, rank: int, x: float, y: float, cell: float) -> None:
    fill, dark = _fill(placement, rank), placement.index_in("cp", rank) % 2 == 1
    canvas.rect(x, y, cell - 1.5, _HIGH, fill, radius=3, tip=describe_rank(placement, rank), dark=dark)
    if text_width(str(rank), 11) <= cell - 1.5:
        canvas.text(x + (cell - 1.5) / 2, y + 17, rank, "ink", anchor="middle", size=11)


def _fill(placement: Placement, rank: int) -> str:
    return STAGES[placement.index_in("pp", rank) % len(STAGES)]


def _frames(canvas: Canvas, placement: Placement, spots: list[tuple[int, float, float]], cell: float) -> None:
    """Draw a frame around adjacent ranks of a line that are on the same node."""
    start = 0
    for index in range(1, len(spots) + 1):
        node = placement.node_of(spots[start][0])
        if index < len(spots) and placement.node_of(spots[index][0]) == node:
            continue
        x, y = spots[start][1], spots[start][2]
        end = spots[index - 1][1] + cell
        canvas.rect(x - 3, y - 3, end - x + 4.5, _HIGH + 6, "none", outline="edge", radius=5, tip=f"node {node}")
        start = index


def _tiles(chunk: Chunk, *, ranges: bool = False) -> list[tuple[str, str, int]]:
    """The tiles of a chunk as (label, description, width in layers). With ``ranges`` the decoder layers are one tile."""
    tiles = [("E", "the embedding", 1)] if chunk.embedding else []
    if ranges and len(chunk.layers):
        tiles.append((_span(chunk.layers), f"layers {_span(chunk.layers)}", len(chunk.layers)))
    else:
        tiles += [(str(layer), f"layer {layer}", 1) for layer in chunk.layers]
    tiles += [("M", "multi-token prediction", 1)] * chunk.mtp_layers
    return [*tiles, ("O", "the output layer and the loss", 1)] if chunk.loss else tiles


def _held(stage: tuple[Chunk, ...]) -> str:
    """The contents of a stage: each chunk if there are few, otherwise the numbers of chunks and layers."""
    if len(stage) <= 2:
        return "; ".join(chunk.describe() for chunk in stage)
    layers = [len(chunk.layers) for chunk in stage]
    sizes = str(min(layers)) if min(layers) == max(layers) else f"{min(layers)}-{max(layers)}"
    extra = [name for name, there in (("embedding", stage[0].embedding), ("output", stage[-1].loss)) if there]
    return ", ".join([f"{sum(layers)} layers in {len(stage)} chunks of {sizes}", *extra])


def _shorten(words: str, width: float) -> str:
    while text_width(words) > width and len(words) > 4:
        words = words[:-2].rstrip(" ;,…") + "…"
    return words


def _span(numbers: range) -> str:
    if not len(numbers):
        return "none"
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
