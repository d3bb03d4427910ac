# SPDX-License-Identifier: Apache-2.0
"""Fully sharded data parallelism: when each layer's weights are whole, from a step of torch's `fully_shard`."""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo2.preflight.rehearse.silent_group import BACKEND, Call, listen, register
from nemo2.report.pictures.svg import Canvas, legend
from tools.explained.kit import (
    BACKWARD,
    COMMUNICATION,
    ELSEWHERE,
    FORWARD,
    LEFT,
    SMALL,
    TOP,
    WIDTH,
    box,
    note,
    sheet,
    signed,
)

RANKS, WIDTHS = 4, (8, 16, 24, 8)
"""Ranks, and the layers' sizes: all different, so that a message tells its layer by its size."""

_WHOLE = "c3"

Moment = tuple[str, int, tuple[bool, ...]]
"""Event (``forward``, ``backward``, ``all_gather``, ``reduce_scatter``), its layer, and which layers are whole."""


def trace(*, free_after_forward: bool) -> list[Moment]:
    """One step of three layers on rank 0 of `RANKS`.

    Args:
        free_after_forward: ``reshard_after_forward``: weights are sharded again between forward and backward (ZeRO-3).
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    moments: list[Moment] = []
    layers: list[Any] = []

    def happened(what: str, layer: int) -> None:
        moments.append((what, layer, tuple(not isinstance(one.weight, DTensor) for one in layers)))

    class Traced(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, index: int) -> Tensor:
            ctx.index = index
            happened("forward", index)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            happened("backward", ctx.index)
            return grad, None

    class Layer(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out: Any = Traced.apply(super().forward(x), layers.index(self))
            return out

    def heard(call: Call, tensors: list[Tensor]) -> None:
        happened(call.kind, [one.weight.numel() for one in layers].index(max(one.numel() for one in tensors)))

    register()
    dist.init_process_group(BACKEND, store=FakeStore(), rank=0, world_size=RANKS)
    stop = listen(heard)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mesh = init_device_mesh("cpu", (RANKS,))
            layers += [Layer(a, b, bias=False) for a, b in zip(WIDTHS, WIDTHS[1:], strict=False)]
            for layer in layers:
                fully_shard(layer, mesh=mesh, reshard_after_forward=free_after_forward)
            net = torch.nn.Sequential(*layers)
            net(torch.ones(2, WIDTHS[0], requires_grad=True)).sum().backward()
        happened("end", 0)
    finally:
        stop()
        dist.destroy_process_group()
    return moments


def fsdp() -> Canvas:
    """A layer gathered, used, freed; beside it ZeRO-2, which keeps what was gathered for the backward pass."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    canvas = sheet(f"Fully sharded: a step of three layers, one of {RANKS} ranks")
    y = TOP + 4
    for words, free in (("ZeRO-3: freed after the forward", True), ("kept until the backward, as in ZeRO-2", False)):
        y = _steps(canvas, y, words, trace(free_after_forward=free))
    legend(
        canvas, LEFT, y + 2, [(FORWARD, "forward"), (BACKWARD, "backward"), (_WHOLE, "whole"), (ELSEWHERE, "a shard")]
    )
    y = note(canvas, y + 22, "G: all-gather of the layer's weights; R: reduce-scatter of its gradients")
    return signed(canvas, y - 14, fully_shard, FSDPModule)


def _steps(canvas: Canvas, y: float, words: str, moments: list[Moment]) -> float:
    """One column per moment, one row per layer; a layer is whole in its column if it is whole as the moment comes."""
    canvas.text(LEFT, y + 10, words, "ink", strong=True)
    shown = [one for one in moments if one[0] != "end"]
    left, count = 58.0, len(moments[0][2])
    column = (WIDTH - LEFT - left) / len(shown)
    y += 20
    fills = {"forward": FORWARD, "backward": BACKWARD, "all_gather": COMMUNICATION, "reduce_scatter": COMMUNICATION}
    labels = {"forward": "F", "backward": "B", "all_gather": "G", "reduce_scatter": "R"}
    for layer in range(count):
        canvas.text(LEFT, y + 15, f"layer {layer}", "ink", size=SMALL)
        for number, (what, which, whole) in enumerate(shown):
            x = left + number * column
            mine = which == layer
            fill = fills[what] if mine else _WHOLE if whole[layer] else ELSEWHERE
            box(
                canvas,
                x,
                y,
                column - 1,
                22,
                labels[what] if mine else "",
                fill,
                outline=mine,
                tip=f"{what} of layer {which}",
            )
        y += 26
    return y + 12
