# SPDX-License-Identifier: Apache-2.0
"""Several parallelisms at once: eight ranks in three kinds of groups, and a recipe on many nodes."""

from nemo2 import recipes
from nemo2.mcore.parallel.layout import GROUP_NAMES, Layout, groups_of
from nemo2.report.pictures.placement import describe_rank
from nemo2.report.pictures.ranks import place_recipe, stages_of
from nemo2.report.pictures.svg import Canvas, legend
from nemo2.report.pictures.terminal import ranks_text
from tools.explained.kit import LEFT, OF_RANK, SMALL, TOP, WIDTH, box, note, sheet, signed


def small() -> Canvas:
    """TP 2, PP 2, DP 2 on eight ranks."""
    from megatron.core.parallel_state import RankGenerator, initialize_model_parallel

    layout, world = Layout(tp=2, pp=2), 8
    groups = groups_of(layout, world)
    stages = stages_of(layout, num_layers=4)
    canvas = sheet(f"TP {layout.tp}, PP {layout.pp} and DP {world // layout.tp // layout.pp} on {world} ranks")
    left, cell, replica, row = 96.0, 62.0, 150.0, 92.0
    where = {}
    for pipeline in groups["pp"]:
        for stage, rank in enumerate(pipeline):
            tp_rank = next(group.index(rank) for group in groups["tp"] if rank in group)
            dp_rank = next(group.index(rank) for group in groups["dp"] if rank in group)
            where[rank] = (left + dp_rank * replica + tp_rank * cell, TOP + 22 + stage * row)
    for index in range(len(groups["dp"][0])):
        canvas.text(
            left + index * replica + cell - 2, TOP + 10, f"replica {index}", "ink", anchor="middle", strong=True
        )
    for stage, (chunk,) in enumerate(stages):
        y = TOP + 22 + stage * row
        canvas.text(LEFT, y + 18, f"stage {stage}", "ink", strong=True)
        for line, words in enumerate(chunk.describe().split(", ")):
            canvas.text(LEFT, y + 33 + line * 14, words, size=SMALL)
    for group in groups["pp"]:
        for one, other in zip(group, group[1:], strict=False):
            canvas.arrow(where[one][0] + 30, where[one][1] + 46, where[other][0] + 30, where[other][1] - 2)
    for group in groups["dp"]:
        (x1, y), (x2, _) = where[group[0]], where[group[-1]]
        lift = 8 if x1 == left else 16  # the two lines of a stage, apart
        for x in (x1, x2):
            canvas.line(x + 20, y + 44, x + 20, y + 44 + lift, "accent", dashed=True)
        canvas.line(x1 + 20, y + 44 + lift, x2 + 20, y + 44 + lift, "accent", dashed=True)
    for rank, (x, y) in where.items():
        tp_rank = next(group.index(rank) for group in groups["tp"] if rank in group)
        box(canvas, x, y, cell - 2, 44, f"rank {rank}\nhalf {tp_rank}", OF_RANK[tp_rank])
    y = TOP + 22 + len(stages) * row
    legend(canvas, LEFT, y, [(OF_RANK[half], f"half {half} of each matrix") for half in range(layout.tp)])
    y += 20
    for kind, words in (
        ("tp", "touching; all-reduce in each layer"),
        ("pp", "grey arrows; activations"),
        ("dp", "blue lines; gradients"),
    ):
        members = "  ".join(ranks_text(group).replace(", ", ",") for group in groups[kind])
        canvas.text(LEFT, y, f"{kind.upper()} groups: {members}", "ink", size=SMALL)
        canvas.text(WIDTH - LEFT, y, words, anchor="end", size=SMALL)
        y += 16
    return signed(canvas, y - 12, initialize_model_parallel, RankGenerator)


def recipe() -> Canvas:
    """A figure of one replica of Llama 3 70B, rank by rank, with the extent of each kind of group."""
    from megatron.core.parallel_state import RankGenerator

    placement = place_recipe(recipes.get("llama3_70b").pretrain_recipe(), name="llama3_70b", world_size=1152)
    layout = placement.layout
    canvas = sheet(f"llama3_70b: one of {placement.replicas} replicas on {placement.world_size:,} ranks")
    note(canvas, TOP + 6, placement.layout.describe(placement.world_size), tone="ink")
    rows = placement.replica(0)
    left, gap = 62.0, 5.0
    cell = (WIDTH - LEFT - left - gap * (len(rows[0]) // layout.tp)) / len(rows[0])
    y = TOP + 22
    for stage, row in enumerate(rows):
        canvas.text(LEFT, y + 17, f"stage {stage}", "ink")
        nodes = sorted({placement.node_of(rank) for rank in row})
        canvas.rect(left - 4, y - 4, WIDTH - left, 34, "none", outline="edge", radius=5, tip=f"node {nodes}")
        for index, rank in enumerate(row):
            x = left + index * cell + (index // layout.tp) * gap
            fill = OF_RANK[placement.index_in("cp", rank)]
            box(canvas, x, y, cell - 1, 26, rank, fill, size=SMALL, tip=describe_rank(placement, rank))
        held = placement.stages[stage]
        layers = ", ".join(f"{chunk.layers[0]}-{chunk.layers[-1]}" for chunk in held)
        canvas.text(left, y + 44, f"layers {layers}", size=SMALL)
        y += 56
    legend(canvas, LEFT, y + 6, [(OF_RANK[index], f"CP slice {index} of a sequence") for index in range(layout.cp)])
    y = note(
        canvas,
        y + 24,
        f"touching: a TP group; frames: nodes of {placement.gpus_per_node}",
    )
    for kind in ("tp", "cp", "pp", "dp"):
        groups = placement.groups[kind]
        canvas.text(LEFT, y + 6, GROUP_NAMES[kind], "ink", size=SMALL)
        said = f"{len(groups[0])} ranks, over {placement.nodes_spanned(kind)} node{'s' * (placement.nodes_spanned(kind) > 1)}"
        canvas.text(128, y + 6, said, size=SMALL)
        canvas.text(WIDTH - LEFT, y + 6, ranks_text(groups[0]), anchor="end", size=SMALL)
        y += 16
    return signed(canvas, y - 6, RankGenerator)
