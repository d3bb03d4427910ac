# SPDX-License-Identifier: Apache-2.0
"""Figures of the placement of layers and experts in real recipes: chunks of layers by stage, and the ranks of an
expert-parallel group."""

from nemo2 import recipes
from nemo2.report.pictures.placement import describe_rank
from nemo2.report.pictures.ranks import place_recipe
from nemo2.report.pictures.svg import Canvas, legend
from tools.explained.kit import LEFT, OF_RANK, PLAIN, SMALL, TOP, WIDTH, box, note, sheet, signed


def layers() -> Canvas:
    """Llama 3 70B's layers over four stages, chunk by chunk."""
    from megatron.core.parallel_state import RankGenerator
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    placement = place_recipe(recipes.get("llama3_70b").pretrain_recipe(), name="llama3_70b", world_size=1152)
    stages = placement.stages
    canvas = sheet(f"llama3_70b: {placement.num_layers} layers over {len(stages)} stages")
    left = 60.0
    cell = (WIDTH - LEFT - left) / len(stages)
    y = TOP + 10
    for stage in range(len(stages)):
        canvas.text(left + (stage + 0.5) * cell, y, f"stage {stage}", "ink", anchor="middle", size=SMALL, strong=True)
        reach = [rank for row in placement.replica(0)[stage : stage + 1] for rank in row]
        canvas.text(left + (stage + 0.5) * cell, y + 14, f"{reach[0]}-{reach[-1]}", anchor="middle", size=SMALL)
    canvas.text(LEFT, y + 14, "ranks", "ink", size=SMALL)
    y += 24
    for number in range(len(stages[0])):
        canvas.text(LEFT, y + 20, f"chunk {number}", "ink", size=SMALL)
        for stage, chunks in enumerate(stages):
            held = chunks[number]
            ends = [word for word, has in (("embedding", held.embedding), ("output", held.loss)) if has]
            words = "\n".join([f"{held.layers[0]}-{held.layers[-1]}", *ends])
            fill = (*OF_RANK, PLAIN)[number % 5]
            box(canvas, left + stage * cell, y, cell - 4, 32, words, fill, size=SMALL, tip=held.describe())
        y += 38
    y = note(
        canvas,
        y + 12,
        "a micro-batch goes through a row from left to right, then through the next: once for each chunk",
    )
    return signed(canvas, y - 14, RankGenerator, get_transformer_layer_offset)


def experts() -> Canvas:
    """Mixtral's experts, each cut over two ranks, and the replicas that an expert-parallel group reaches over."""
    from megatron.core.parallel_state import RankGenerator
    from megatron.core.transformer.moe.moe_layer import BaseMoELayer

    placement = place_recipe(recipes.get("mixtral_8x22b").pretrain_recipe(), name="mixtral_8x22b")
    layout, group = placement.layout, placement.group_of("ep", 0)
    canvas = sheet(f"mixtral_8x22b: {placement.num_experts} experts on {len(group) * layout.expert_tensor_size} ranks")
    left, high = 60.0, 40.0
    cell = (WIDTH - LEFT - left) / 4
    y = TOP + 4
    parts = layout.expert_tensor_size
    for start in range(0, len(group), 4):
        for part in range(parts):
            node = sorted({placement.node_of(placement.group_of("etp", one)[part]) for one in group[start : start + 4]})
            if part == 0:
                canvas.text(LEFT, y + 16, f"node {', '.join(map(str, node))}", "ink", size=SMALL, strong=True)
            for column, member in enumerate(group[start : start + 4]):
                rank = placement.group_of("etp", member)[part]
                held = placement.experts_of(rank)
                words = f"expert {held[0]}\nrank {rank}"
                fill = OF_RANK[placement.index_in("cp", rank) % len(OF_RANK)]
                box(
                    canvas,
                    left + column * cell,
                    y,
                    cell - 4,
                    high - 4,
                    words,
                    fill,
                    size=SMALL,
                    tip=describe_rank(placement, rank),
                )
                assert len(held) == 1
            y += high
        y += 8
    replicas = {placement.index_in("dp", rank) for rank in group}
    legend(canvas, LEFT, y + 10, [(OF_RANK[index], f"CP slice {index} of a sequence") for index in range(layout.cp)])
    y = note(
        canvas,
        y + 30,
        f"one of {len(placement.groups['ep'])} groups: over {placement.nodes_spanned('ep')} nodes, {len(replicas)} replicas and "
        f"{layout.cp} slices of a sequence; an expert is sharded over {parts} ranks",
    )
    return signed(canvas, y - 14, RankGenerator, BaseMoELayer)
