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


@functools.cache
def with_post_norm(linear: type) -> Any:
    """The row-parallel `linear` (Megatron-Core's or Transformer Engine's) with a norm of its output."""

    class WithPostNorm(linear):
        """Its output is reduced over the tensor-parallel ranks, so each token's vector is whole when normalised."""

        def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any):
            super().__init__(input_size, output_size, config=config, **kwargs)
            self.post_layernorm = TorchNorm(config, output_size, eps=config.layernorm_epsilon)

        def forward(self, x: Tensor) -> tuple[Tensor, None]:
            """The norm of the output, its bias included."""
            return self.finished(*self.project(x))

        def project(self, x: Tensor) -> tuple[Tensor, Any]:
            """The output before the norm, and the bias that is to be added to it."""
            return super().forward(x)

        def finished(self, output: Tensor, bias: Any) -> tuple[Tensor, None]:
            return self.post_layernorm(output if bias is None else output + bias), None

    WithPostNorm.__name__ = WithPostNorm.__qualname__ = f"{linear.__name__}WithPostNorm"
    return WithPostNorm


@functools.cache
def with_multiplier(linear: type) -> Any:
    """The row-parallel `linear` with its output, the bias included, times ``config.residual_multiplier`` (Granite)."""

    class WithMultiplier(linear):
        def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any):
            super().__init__(input_size, output_size, config=config, **kwargs)
            self.multiplier = config.residual_multiplier

        def forward(self, x: Tensor) -> tuple[Tensor, None]:
            return self.finished(*self.project(x))

        def project(self, x: Tensor) -> tuple[Tensor, Any]:
            """The output before it is multiplied, and the bias that is to be added to it."""
            return super().forward(x)

        def finished(self, output: Tensor, bias: Any) -> tuple[Tensor, None]:
            return (output if bias is None else output + bias) * self.multiplier, None

    WithMultiplier.__name__ = WithMultiplier.__qualname__ = f"{linear.__name__}WithMultiplier"
    return WithMultiplier
