# SPDX-License-Identifier: Apache-2.0
"""Trains in one process with sums in another order, to measure the effect of rounding on a run in bf16.

Layouts split the sums of matrix products: tensor parallelism splits the inner dimension, and sequence, context and
expert parallelism split the tokens in the sum of a weight's gradient. Each partial sum is rounded to bf16 before the
partial sums are added. One process can do the same with randomly drawn parts. Another draw gives another rounding of
the same sums.

The order in which gradients of micro-batches are added is not varied: those sums are fp32, and another order changed
the losses by less than 1e-7.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@contextmanager
def products(*, parts: int = 1, draw: int = 0) -> Iterator[None]:
    """Within it, linear layers form their products, forward and backward, as sums of ``parts`` partial ones, each rounded to
    the dtype of the model. One part changes nothing. ``draw`` 0 cuts what is summed over where tensor parallelism splits it;
    other numbers deal it out at random."""
    if parts == 1:
        yield
        return
    from megatron.core.tensor_parallel import layers

    original = layers.linear_with_grad_accumulation_and_async_allreduce

    def in_parts(input: Tensor, weight: Tensor, bias: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        output = _InParts.apply(input, weight, parts, draw)
        return output if bias is None else output + bias

    # One process only: nothing is gathered or reduced around the product.
    assert torch.distributed.get_world_size() == 1
    layers.linear_with_grad_accumulation_and_async_allreduce = in_parts
    try:
        yield
    finally:
        layers.linear_with_grad_accumulation_and_async_allreduce = original


class _InParts(torch.autograd.Function):
    """``x @ weight.T``; x ``[..., in]``, weight ``[out, in]``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, parts: int, draw: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.drawn = parts, draw
        return _total(F.linear(x[..., share], weight[:, share]) for share in _shares(x.shape[-1], parts, draw))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        of_input = _total(gradient[..., share] @ weight[share] for share in _shares(weight.shape[0], *ctx.drawn))
        g, tokens = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
        of_weight = _total(g[share].t() @ tokens[share] for share in _shares(len(tokens), *ctx.drawn))
        return of_input, of_weight, None, None


@functools.cache
def _shares(size: int, parts: int, draw: int) -> tuple[Tensor, ...]:
    """The numbers below ``size`` in at most ``parts`` shares."""
    generator = torch.Generator().manual_seed(7919 * draw + size)
    order = torch.randperm(size, generator=generator) if draw else torch.arange(size)
    return tuple(share.sort().values for share in order.chunk(parts))


def _total(partial: Iterator[Tensor]) -> Tensor:
    total = next(partial)
    for one in partial:
        total = total + one
    return total
