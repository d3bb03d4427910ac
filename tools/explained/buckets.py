# SPDX-License-Identifier: Apache-2.0
"""Data-parallel overlap: buckets of gradients reduced beside the backward pass, of weights gathered beside the forward."""

from dataclasses import dataclass
from typing import Any

from nemo2 import recipes
from nemo2.mcore.settle import Machine
from nemo2.preflight.checks.facts import read_facts
from nemo2.preflight.planner.recipe import shape_of
from nemo2.report.pictures.svg import Canvas
from tools.explained.data import bucketed
from tools.explained.kit import (
    BACKWARD,
    COMMUNICATION,
    FORWARD,
    LEFT,
    PLAIN,
    SMALL,
    TOP,
    WIDTH,
    box,
    note,
    sheet,
    signed,
)

RECIPE, DP = "llama32_1b", 8
_BACKWARD, _FORWARD, _MESSAGES, _STEP = 2.0, 1.0, 1.2, 0.15
"""Time of a backward and a forward pass, of all messages of one direction, of the optimizer's step."""
_FROM = 92.0


@dataclass(frozen=True)
class Piece:
    start: float
    end: float
    bucket: int


def buckets() -> list[int]:
    """Elements of each bucket, in the order of the backward pass."""
    from nemo2.mcore.settle.overlap import DEFAULT_BUCKET_SIZE

    shape = shape_of(read_facts(recipes.get(RECIPE).pretrain_recipe(), machine=Machine.named(f"H100x{DP}")))
    weights = [(shape.vocab, shape.hidden)]
    for part in (part for layer in shape.layers for part in layer.parts):
        weights += [(linear.outputs, linear.inputs) for linear in part.linears]
    buffer: Any = bucketed(weights, dp=DP, bucket_size=DEFAULT_BUCKET_SIZE)
    return [end - start for start, end in buffer.bucket_indices]


def overlap() -> Canvas:
    """The end of one step and the begin of the next, with and without overlap."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    sizes = buckets()
    canvas = sheet(f"Buckets beside the passes: {RECIPE}, DP {DP}")
    longest = _BACKWARD + _FORWARD + 2 * _MESSAGES + _STEP
    across = (WIDTH - LEFT - _FROM) / longest
    y = TOP + 4
    for words, on in (("without overlap", False), ("overlapped", True)):
        backward, reduced, step, gathered, forward = play(sizes, overlapped=on)
        canvas.text(LEFT, y + 10, f"{words}: {forward[-1].end / _FORWARD:.2f} times a forward pass", "ink", strong=True)
        y += 20
        lanes = (
            ("backward", [(backward, BACKWARD)]),
            ("reduce-scatter", [(reduced, COMMUNICATION)]),
            ("optimizer", [([step], PLAIN)]),
            ("all-gather", [(gathered, COMMUNICATION)]),
            ("next forward", [(forward, FORWARD)]),
        )
        for name, pieces in lanes:
            canvas.text(LEFT, y + 14, name, "ink", size=SMALL)
            for row, fill in pieces:
                for one in row:
                    width = (one.end - one.start) * across
                    label = one.bucket if one.bucket >= 0 and width > 6.5 else ""
                    tip = f"bucket {one.bucket}: {sizes[one.bucket]:,} elements" if one.bucket >= 0 else "the step"
                    box(canvas, _FROM + one.start * across, y, width, 18, label, fill, size=SMALL, tip=tip)
            y += 21
        y += 10
    y = note(
        canvas,
        y + 4,
        f"numbers: {len(sizes)} buckets of {min(sizes) / 1e6:,.0f} to {max(sizes) / 1e6:,.0f} million elements, the last layers' "
        f"first; here all messages of a direction take {_MESSAGES / _BACKWARD:.0%} of the backward's time. Overlapped: with "
        "overlap_grad_reduce and overlap_param_gather",
    )
    return signed(canvas, y - 14, DistributedDataParallel, _ParamAndGradBucketGroup)


def play(sizes: list[int], *, overlapped: bool) -> tuple[list[Piece], list[Piece], Piece, list[Piece], list[Piece]]:
    """When each bucket's backward, reduce-scatter, all-gather and next forward are; time goes with the elements.

    Args:
        sizes: The sizes of the buckets, in the order of the backward pass.
        overlapped: A bucket is reduced once its gradients are there, and gathered once the step is done, while the forward of
            the bucket before runs. Otherwise each waits for all that comes before it.
    """
    share = [size / sum(sizes) for size in sizes]
    order = list(range(len(sizes)))
    backward = _in_a_row(order, share, _BACKWARD, [0.0] * len(sizes))
    done = backward[-1].end
    reduced = _in_a_row(order, share, _MESSAGES, [one.end if overlapped else done for one in backward])
    step = Piece(reduced[-1].end, reduced[-1].end + _STEP, -1)
    gathered = _in_a_row(order[::-1], share, _MESSAGES, [step.end] * len(sizes))
    arrived = [one.end if overlapped else gathered[-1].end for one in gathered]
    forward = _in_a_row(order[::-1], share, _FORWARD, arrived)
    return backward, reduced, step, gathered, forward


def _in_a_row(order: list[int], share: list[float], whole: float, ready: list[float]) -> list[Piece]:
    """Pieces one after the other, none before it is ready."""
    pieces: list[Piece] = []
    for bucket, at in zip(order, ready, strict=True):
        start = max(at, pieces[-1].end if pieces else 0.0)
        pieces.append(Piece(start, start + whole * share[bucket], bucket))
    return pieces
