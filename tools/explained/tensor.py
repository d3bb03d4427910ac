# SPDX-License-Identifier: Apache-2.0
"""Tensor and sequence parallelism: how a layer's matrices are cut, and which parts run on a shard of the sequence."""

from dataclasses import dataclass

import torch

from nemo2.report.pictures.svg import Canvas
from tools.explained.kit import (
    COMMUNICATION,
    ELSEWHERE,
    LEFT,
    OF_RANK,
    PLAIN,
    SMALL,
    TOP,
    WIDTH,
    box,
    note,
    sheet,
    signed,
)
from tools.explained.traced import Made, group, silent

TP, TOKENS, HIDDEN, FFN, HEADS = 2, 8, 16, 64, 4


@dataclass(frozen=True)
class Block:
    """Weights and messages of one tensor-parallel rank of an MLP."""

    up: tuple[int, ...]
    down: tuple[int, ...]
    cut: tuple[int, int]
    """The dimension of ``[out, in]`` along which each of the two matrices is cut."""
    forward: list[Made]
    backward: list[Made]


def run_block(*, sequence_parallel: bool) -> Block:
    """One forward and backward pass of an MLP of Megatron-Core's two linear layers, on rank 0 of `TP`."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.transformer_config import TransformerConfig

    with silent() as made:
        config = TransformerConfig(
            num_layers=1,
            hidden_size=HIDDEN,
            num_attention_heads=HEADS,
            tensor_model_parallel_size=TP,
            sequence_parallel=sequence_parallel,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
        )
        common = {"config": config, "init_method": torch.nn.init.ones_, "bias": False, "tp_group": group(TP)}
        up = ColumnParallelLinear(HIDDEN, FFN, gather_output=False, **common)
        down = RowParallelLinear(FFN, HIDDEN, input_is_parallel=True, skip_bias_add=False, **common)
        held = TOKENS // TP if sequence_parallel else TOKENS
        out = down(up(torch.ones(held, 1, HIDDEN, requires_grad=True))[0])[0]
        forward = len(made)
        out.sum().backward()
        cut = (up.weight.partition_dim, down.weight.partition_dim)
        return Block(tuple(up.weight.shape), tuple(down.weight.shape), cut, made[:forward], made[forward:])


def mlp() -> Canvas:
    """The first matrix by columns, the second by rows, one all-reduce behind them."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region

    block = run_block(sequence_parallel=False)
    assert block.cut == (0, 1)  # of [out, in]: the first by its outputs, the second by its inputs
    canvas = sheet(f"Tensor parallelism: an MLP on {TP} ranks")
    unit, x_up, x_mid, x_down, x_out = 2.0, 66.0, 150.0, 230.0, 310.0
    columns = (
        (LEFT, "input"),
        (x_up, "up matrix,\nby columns"),
        (x_mid, "activation"),
        (x_down, "down matrix,\nby rows"),
    )
    for x, words in (*columns, (x_out, "partial sum")):
        for line, part in enumerate(words.split("\n")):
            canvas.text(x, TOP + 4 + 14 * line, part, size=SMALL)
    for rank in range(TP):
        y, fill = TOP + 34 + rank * 92, OF_RANK[rank]
        canvas.text(LEFT, y + 70, f"rank {rank}", "ink", strong=True)
        middle = y + 26
        box(canvas, LEFT, middle - 16, 44, 32, f"{TOKENS}×{HIDDEN}", PLAIN, size=SMALL)
        wide, high = block.up[0] * unit, block.up[1] * unit
        box(canvas, x_up, middle - high / 2, wide, high, f"{block.up[1]}×{block.up[0]}", fill)
        box(canvas, x_mid, middle - 16, block.up[0] * unit, 32, f"{TOKENS}×{block.up[0]}", fill, size=SMALL)
        wide, high = block.down[0] * unit, block.down[1] * unit
        box(
            canvas, x_down + 4, middle - high / 2, wide + 12, high, f"{block.down[1]}×{block.down[0]}", fill, size=SMALL
        )
        box(canvas, x_out, middle - 16, 48, 32, f"{TOKENS}×{block.forward[0][1][-1]}", fill, size=SMALL)
        for a, b in ((LEFT + 46, x_up), (x_up + 66, x_mid), (x_mid + 66, x_down + 4), (x_down + 50, x_out)):
            canvas.arrow(a, middle, b - 2, middle)
    y = TOP + 34 + TP * 92
    for rank in range(TP):
        canvas.line(x_out + 48, TOP + 60 + rank * 92, x_out + 64, TOP + 60 + rank * 92, "accent")
    canvas.line(x_out + 64, TOP + 60, x_out + 64, y, "accent")
    canvas.arrow(x_out + 64, y - 8, x_out + 64, y + 2, "accent")
    box(canvas, 180, y + 2, WIDTH - 188, 24, f"forward: {_says(block.forward)} of {TOKENS}×{HIDDEN}", COMMUNICATION)
    y = note(canvas, y + 44, f"backward: {_says(block.backward)} of the input's gradient, before the up matrix")
    return signed(canvas, y - 14, ColumnParallelLinear, RowParallelLinear, reduce_from_tensor_model_parallel_region)


def heads() -> Canvas:
    """Attention: whole heads on each rank, the projection by rows."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.utils import divide

    # Megatron-Core's own arithmetic of Attention.__init__.
    per_rank = divide(HEADS, TP)
    canvas = sheet(f"Tensor parallelism: {HEADS} heads on {TP} ranks")
    for rank in range(TP):
        y, fill = TOP + rank * 62, OF_RANK[rank]
        canvas.text(LEFT, y + 26, f"rank {rank}", "ink", strong=True)
        box(canvas, 56, y, 78, 44, "linear_qkv\nby columns", fill, size=SMALL)
        for index in range(per_rank):
            head = rank * per_rank + index
            box(canvas, 154 + index * 52, y, 48, 44, f"head {head}", fill, tip=f"query, key and value of head {head}")
        end = 154 + per_rank * 52 - 4
        canvas.arrow(136, y + 22, 152, y + 22)
        canvas.arrow(end + 2, y + 22, end + 18, y + 22)
        box(canvas, end + 20, y, 78, 44, "linear_proj\nby rows", fill, size=SMALL)
        canvas.line(end + 98, y + 22, end + 114, y + 22, "accent")
    x, y = 154 + per_rank * 52 - 4 + 114, TOP + TP * 62
    canvas.line(x, TOP + 22, x, y - 10, "accent")
    canvas.arrow(x, y - 12, x, y - 2, "accent")
    box(canvas, 180, y - 2, WIDTH - 188, 24, "all-reduce of the partial sums", COMMUNICATION)
    return signed(canvas, y + 26, SelfAttention, ColumnParallelLinear, RowParallelLinear)


def sequence() -> Canvas:
    """Layers between two matrices have a shard of the tokens; two conversions lead in and out."""
    from megatron.core.tensor_parallel.mappings import (
        gather_from_sequence_parallel_region,
        reduce_scatter_to_sequence_parallel_region,
    )

    block = run_block(sequence_parallel=True)
    kinds = [kind for kind, _ in block.forward]
    assert kinds == ["all_gather", "reduce_scatter"], kinds
    canvas = sheet(f"Sequence parallelism: half a layer on {TP} ranks")
    share = TOKENS // TP
    parts = [
        ("LayerNorm", False, ""),
        ("all-gather", True, kinds[0]),
        ("up, activation, down", True, ""),
        ("reduce-scatter", True, kinds[1]),
        ("dropout, residual", False, ""),
    ]
    column, cell, gap = 133.0, 14.0, 9.0
    lefts = [108.0, 108.0 + column + gap]
    for rank, left in enumerate(lefts):
        canvas.text(left + column / 2, TOP + 10, f"rank {rank}", "ink", anchor="middle", strong=True)
    y = TOP + 20
    for words, whole, conversion in parts:
        if conversion:
            x = lefts[0] - 10
            box(
                canvas,
                x,
                y,
                WIDTH - 8 - x,
                24,
                f"{words} of {block.forward[kinds.index(conversion)][1][0]} tokens",
                COMMUNICATION,
            )
            y += 32
            continue
        canvas.text(LEFT, y + 13, words.split(",")[0] + ("," if "," in words else ""), "ink", size=SMALL)
        canvas.text(LEFT, y + 26, ",".join(words.split(",")[1:]).strip(), "ink", size=SMALL)
        for rank, left in enumerate(lefts):
            for token in range(TOKENS):
                mine = token // share == rank
                fill = OF_RANK[token // share] if whole or mine else ELSEWHERE
                tip = f"token {token}" + ("" if whole or mine else " is not on this rank")
                box(
                    canvas,
                    left + token * (cell + 3),
                    y,
                    cell,
                    26,
                    token if whole or mine else "",
                    fill,
                    size=SMALL,
                    tip=tip,
                )
            said = f"{TOKENS} tokens, 1/{TP} matrix" if whole else f"{share} tokens, all features"
            canvas.text(left + column / 2, y + 40, said, anchor="middle", size=SMALL)
        y += 52
    y = note(canvas, y + 6, f"backward, the other way round: {_says(block.backward)}")
    return signed(canvas, y - 14, gather_from_sequence_parallel_region, reduce_scatter_to_sequence_parallel_region)


def _says(made: list[Made]) -> str:
    return ", ".join(dict.fromkeys(kind.replace("_", "-") for kind, _ in made))
