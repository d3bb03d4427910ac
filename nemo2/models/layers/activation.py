# SPDX-License-Identifier: Apache-2.0
"""The gated form of activations, as `TransformerConfig` describes it."""

from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


def activate(x: Tensor, config: TransformerConfig) -> Tensor:
    """`[..., ffn]` from `[..., ffn]`, or from `[..., 2 * ffn]` with `gated_linear_unit`: act(first half) * second half.

    `activation_func_clamp_value` bounds the first half from above and the second on both sides, and
    `glu_linear_offset` is added to the second (gpt-oss uses both).
    """
    assert config.activation_func is not None
    if not config.gated_linear_unit:
        return config.activation_func(x)
    gate, linear = x.chunk(2, dim=-1)
    bound = config.activation_func_clamp_value
    if bound is not None:
        gate, linear = gate.clamp(max=bound), linear.clamp(min=-bound, max=bound)
    return config.activation_func(gate) * (linear + config.glu_linear_offset)
