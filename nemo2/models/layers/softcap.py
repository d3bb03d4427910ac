# SPDX-License-Identifier: Apache-2.0
"""What follows the output layer: the soft cap of the logits (Gemma 2, arXiv:2408.00118, section 2), cap * tanh(logits / cap),
or a divisor of the logits (Granite). The hooks are partial functions, which can be pickled, unlike closures."""

from functools import partial

import torch
from torch import Tensor, nn


def cap_logits(output_layer: nn.Module, cap: float) -> None:
    """Soft-cap what `output_layer` gives from now on. Elementwise, so logits may be split over the vocabulary."""
    output_layer.register_forward_hook(partial(_cap, cap))


def divide_logits(output_layer: nn.Module, divisor: float) -> None:
    """Divide what `output_layer` gives from now on, before its other hooks change it."""
    output_layer.register_forward_hook(partial(_divide, divisor), prepend=True)


def _cap(cap: float, module: nn.Module, args: tuple, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    logits, *rest = output
    return (cap * torch.tanh(logits / cap), *rest)


def _divide(divisor: float, module: nn.Module, args: tuple, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    logits, *rest = output
    return (logits / divisor, *rest)
