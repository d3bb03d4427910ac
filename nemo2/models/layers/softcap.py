# SPDX-License-Identifier: Apache-2.0
"""What follows the output layer: the soft cap of the logits (Gemma 2, arXiv:2408.00118, section 2), cap * tanh(logits / cap),
or a divisor of the logits (Granite)."""

import torch
from torch import Tensor


class LogitSoftcap:
    """A forward hook of an output layer that returns `(logits, bias)`; picklable, unlike a closure."""

    def __init__(self, cap: float):
        self.cap = cap

    def __call__(self, module: torch.nn.Module, args: tuple, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        del module, args
        logits, *rest = output
        return (self.cap * torch.tanh(logits / self.cap), *rest)


def cap_logits(output_layer: torch.nn.Module, cap: float) -> None:
    """Soft-cap what `output_layer` gives from now on. Elementwise, so logits may be split over the vocabulary."""
    output_layer.register_forward_hook(LogitSoftcap(cap))


class LogitDivisor:
    """A forward hook like `LogitSoftcap`."""

    def __init__(self, divisor: float):
        self.divisor = divisor

    def __call__(self, module: torch.nn.Module, args: tuple, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        del module, args
        logits, *rest = output
        return (logits / self.divisor, *rest)
