# SPDX-License-Identifier: Apache-2.0
"""GPT-3 and the sizes that NVIDIA measured beside it: learned positions, LayerNorm, GELU, biases.

Sources: arXiv:2005.14165, table 2.1 (126M, 175B); NeMo's ``launcher`` configurations for the rest.
"""

from nemo2.models.gpt import GPTConfig


class GPTConfig126M(
    GPTConfig,
    seq_length=2048,
    num_layers=12,
    hidden_size=768,
    ffn_hidden_size=3072,
    num_attention_heads=12,
    bias_activation_fusion=True,
    bias_dropout_fusion=True,
    use_transformer_engine_full_layer_spec=True,
):
    """0.13 B parameters with a vocabulary of 51,200."""


class GPTConfig5B(GPTConfig126M, num_layers=24, hidden_size=4096, ffn_hidden_size=16384, num_attention_heads=32):
    """5.1 B parameters with a vocabulary of 51,200."""


class GPTConfig7B(GPTConfig126M, num_layers=32, hidden_size=4096, ffn_hidden_size=10880, num_attention_heads=32):
    """5.2 B parameters with a vocabulary of 51,200: the width of a gated 7B, without the gate."""


class GPTConfig20B(GPTConfig126M, num_layers=44, hidden_size=6144, ffn_hidden_size=24576, num_attention_heads=48):
    """20.3 B parameters with a vocabulary of 51,200."""


class GPTConfig40B(GPTConfig126M, num_layers=48, hidden_size=8192, ffn_hidden_size=32768, num_attention_heads=64):
    """39.1 B parameters with a vocabulary of 51,200."""


class GPTConfig175B(
    GPTConfig126M,
    num_layers=96,
    hidden_size=12288,
    ffn_hidden_size=49152,
    num_attention_heads=96,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    layernorm_zero_centered_gamma=True,
):
    """174.6 B parameters with a vocabulary of 51,200."""
