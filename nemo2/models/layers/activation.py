# SPDX-License-Identifier: Apache-2.0
"""Activations of feed-forward layers beyond those in torch, and their gated form as `TransformerConfig` describes it."""

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2 (Primer, arXiv:2109.08668); Nemotron's activation."""
    return F.relu(x).square()


def openai_gelu(x: Tensor) -> Tensor:
    """GELU by its tanh approximation (Hendrycks & Gimpel, arXiv:1606.08415, section 2); Gemma's and GPT-2's activation."""
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x), GELU by a logistic approximation (arXiv:1606.08415, section 2); gpt-oss' activation."""
    return x * torch.sigmoid(1.702 * x)


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
