# SPDX-License-Identifier: Apache-2.0
"""Norms behind a sub-layer: attention and feed-forward outputs are normalised before they join the residual stream.

Gemma 2 (arXiv:2408.00118, section 2) and Gemma 3 have one behind each, besides the usual one in front. The norm is part
of the sub-layer's last projection, under the name `post_layernorm`, where NeMo 2.0's checkpoints have it. Granite has a
number in its place.
"""

import functools
from typing import Any

from torch import Tensor

from nemo2.models.layers.norm import TorchNorm


class _Finished:
    """A row-parallel layer's output with its bias, which ``finish`` changes. It is reduced over the tensor-parallel ranks, so
    each token's vector is whole."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.finished(*self.project(x))

    def project(self, x: Tensor) -> tuple[Tensor, Any]:
        """The output before it is changed, and the bias that is to be added to it."""
        return super().forward(x)  # pyright: ignore[reportAttributeAccessIssue]  # the linear layer's

    def finished(self, output: Tensor, bias: Any) -> tuple[Tensor, None]:
        return self.finish(output if bias is None else output + bias), None

    def finish(self, output: Tensor) -> Tensor:
        raise NotImplementedError


@functools.cache
def with_post_norm(linear: type) -> Any:
    """The row-parallel `linear` (Megatron-Core's or Transformer Engine's) with a norm of its output, the bias included."""

    class WithPostNorm(_Finished, linear):
        def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any):
            super().__init__(input_size, output_size, config=config, **kwargs)  # pyright: ignore[reportCallIssue]
            self.post_layernorm = TorchNorm(config, output_size, eps=config.layernorm_epsilon)

        def finish(self, output: Tensor) -> Tensor:
            return self.post_layernorm(output)

    WithPostNorm.__name__ = WithPostNorm.__qualname__ = f"{linear.__name__}WithPostNorm"
    return WithPostNorm


@functools.cache
def with_multiplier(linear: type) -> Any:
    """The row-parallel `linear` with its output, the bias included, times ``config.residual_multiplier`` (Granite)."""

    class WithMultiplier(_Finished, linear):
        def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any):
            super().__init__(input_size, output_size, config=config, **kwargs)  # pyright: ignore[reportCallIssue]
            self.multiplier = config.residual_multiplier

        def finish(self, output: Tensor) -> Tensor:
            return output * self.multiplier

    WithMultiplier.__name__ = WithMultiplier.__qualname__ = f"{linear.__name__}WithMultiplier"
    return WithMultiplier
