# SPDX-License-Identifier: Apache-2.0
"""GPT-3 and the sizes that NVIDIA measured beside it: learned positions, LayerNorm, GELU, biases.

Sources: arXiv:2005.14165, table 2.1 (126M, 175B); NeMo's ``launcher`` configurations for the rest.
"""

from dataclasses import dataclass
from typing import Optional

from nemo2.config.capture import configurable
from nemo2.models.gpt import GPTConfig


@configurable
@dataclass
class GPTConfig126M(GPTConfig):
    """0.13 B parameters with a vocabulary of 51,200."""

    seq_length: int = 2048
    num_layers: int = 12
    hidden_size: int = 768
    ffn_hidden_size: Optional[int] = 3072
    num_attention_heads: int = 12
    bias_activation_fusion: bool = True
    bias_dropout_fusion: bool = True
    use_transformer_engine_full_layer_spec: bool = True


@configurable
@dataclass
class GPTConfig5B(GPTConfig126M):
    """5.1 B parameters with a vocabulary of 51,200."""

    num_layers: int = 24
    hidden_size: int = 4096
    ffn_hidden_size: Optional[int] = 16384
    num_attention_heads: int = 32


@configurable
@dataclass
class GPTConfig7B(GPTConfig126M):
    """5.2 B parameters with a vocabulary of 51,200: the width of a gated 7B, without the gate."""

    num_layers: int = 32
    hidden_size: int = 4096
    ffn_hidden_size: Optional[int] = 10880
    num_attention_heads: int = 32


@configurable
@dataclass
class GPTConfig20B(GPTConfig126M):
    """20.3 B parameters with a vocabulary of 51,200."""

    num_layers: int = 44
    hidden_size: int = 6144
    ffn_hidden_size: Optional[int] = 24576
    num_attention_heads: int = 48


@configurable
@dataclass
class GPTConfig40B(GPTConfig126M):
    """39.1 B parameters with a vocabulary of 51,200."""

    num_layers: int = 48
    hidden_size: int = 8192
    ffn_hidden_size: Optional[int] = 32768
    num_attention_heads: int = 64


@configurable
@dataclass
class GPTConfig175B(GPTConfig126M):
    """174.6 B parameters with a vocabulary of 51,200."""

    num_layers: int = 96
    hidden_size: int = 12288
    ffn_hidden_size: Optional[int] = 49152
    num_attention_heads: int = 96
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    layernorm_zero_centered_gamma: bool = True
