# SPDX-License-Identifier: Apache-2.0
"""One process whose sums are taken in another order: what rounding alone does to a run in bf16.

A layout changes two kinds of sums. Gradients of micro-batches and replicas are added in another order; and with tensor
parallelism a matrix product whose inner dimension is shared out becomes a sum of partial products, each rounded to bf16
before it is added. The first is another micro-batch size or order of samples, the second is `contractions`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@contextmanager
def contractions(parts: int) -> Iterator[None]:
    """Within it, linear layers form their products (forward, and the gradient of their input) as sums of ``parts`` partial
    ones, each rounded to the dtype of the model. One part changes nothing."""
    if parts == 1:
        yield
        return
    from megatron.core.tensor_parallel import layers

    original = layers.linear_with_grad_accumulation_and_async_allreduce

    def in_parts(input: Tensor, weight: Tensor, bias: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        output = _InParts.apply(input, weight, parts)
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
    def forward(ctx: Any, x: Tensor, weight: Tensor, parts: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parts = parts
        pairs = zip(x.chunk(parts, -1), weight.chunk(parts, 1), strict=True)
        return _total([F.linear(share, columns) for share, columns in pairs])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        pairs = zip(gradient.chunk(ctx.parts, -1), weight.chunk(ctx.parts, 0), strict=True)
        of_input = _total([share @ rows for share, rows in pairs])
        of_weight = gradient.reshape(-1, gradient.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
        return of_input, of_weight, None


def _total(partial: list[Tensor]) -> Tensor:
    total = partial[0]
    for one in partial[1:]:
        total = total + one
    return total
