# SPDX-License-Identifier: Apache-2.0
"""What the logits go through where they leave the output layer, before any loss, sampler and further prediction reads them.

A soft cap: cap * tanh(logits / cap) (Gemma 2, arXiv:2408.00118, section 2). A divisor (Granite). And no share of the softmax
for the rows that pad a vocabulary: an embedding is padded to a number of rows that suits the tensor-parallel ranks. With a share
for them, the loss of the same weights depends on the tensor-parallel size (2.4e-4 of it between sizes 1 and 2, for GPT-2's
50,257 tokens). The hooks can be pickled, unlike closures.
"""

from functools import partial

import torch
from megatron.core import parallel_state
from torch import Tensor, nn


def cap_logits(output_layer: nn.Module, cap: float) -> None:
    """Soft-cap what `output_layer` gives from now on. Elementwise, so logits may be split over the vocabulary."""
    output_layer.register_forward_hook(partial(_cap, cap))


def divide_logits(output_layer: nn.Module, divisor: float) -> None:
    """Divide what `output_layer` gives from now on, before its other hooks change it."""
    output_layer.register_forward_hook(partial(_divide, divisor), prepend=True)


class PaddingMask:
    """A forward hook of an output layer that returns `(logits, bias)`: the logits from the column ``tokens`` on become the
    lowest finite number, in place. Picklable, unlike a closure.

    Finite, because a rank may hold padding only: a softmax over its own columns, which is corrected by the other ranks'
    maximum later, would be NaN with -inf. Written past autograd, which would copy the gradient of all logits to zero these
    few columns: the softmax's probability, and with it the gradient that a cross-entropy gives them, already is exactly 0.
    """

    def __init__(self, tokens: int, rows: int, first: int):
        self.tokens = tokens
        """Columns of the whole output that stand for a token."""
        self.rows = rows
        """Columns of the whole output."""
        self.first = first
        """The first column of this tensor-parallel rank in the whole output."""

    def __call__(self, module: nn.Module, args: tuple, output: tuple[Tensor, ...]) -> None:
        del module, args
        logits = output[0]
        gathered = logits.shape[-1] == self.rows
        num_tokens = max(0, self.tokens - (0 if gathered else self.first))
        if num_tokens < logits.shape[-1]:
            logits.detach()[..., num_tokens:] = torch.finfo(logits.dtype).min


def mask_padding(output_layer: nn.Module, tokens: int, rows: int) -> None:
    """Give the last ``rows - tokens`` outputs of `output_layer` no probability from now on. Megatron-Core's groups must exist.

    ``rows`` are those of all tensor-parallel ranks. A hook of the layer that changes logits (`cap_logits`) must come first.
    """
    if tokens < rows:
        per_rank = rows // parallel_state.get_tensor_model_parallel_world_size()
        first = parallel_state.get_tensor_model_parallel_rank() * per_rank
        output_layer.register_forward_hook(PaddingMask(tokens, rows, first))


def _cap(cap: float, module: nn.Module, args: tuple, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    logits, *rest = output
    return (cap * torch.tanh(logits / cap), *rest)


def _divide(divisor: float, module: nn.Module, args: tuple, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    logits, *rest = output
    return (logits / divisor, *rest)
