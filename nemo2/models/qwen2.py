# SPDX-License-Identifier: Apache-2.0
"""Qwen 2 and 2.5: Llama's decoder with biases on queries, keys and values.

Sources: arXiv:2407.10671, table 1, and arXiv:2412.15115, table 1; vocabularies, norms and tying from the released
config.json files of Qwen/Qwen2-* and Qwen/Qwen2.5-*.
"""

from dataclasses import dataclass
from typing import Optional

from nemo2.config.capture import configurable
from nemo2.models.decoder import DecoderConfig
from nemo2.models.gpt import GPTModel


@configurable
@dataclass
class Qwen2Config(DecoderConfig):
    """Settings that all sizes of Qwen 2 share."""

    add_qkv_bias: bool = True
    seq_length: int = 4096
    init_method_std: float = 0.02
    vocab_size: Optional[int] = 151936
    layernorm_epsilon: float = 1e-6
    rotary_base: int = 1_000_000


@configurable
@dataclass
class Qwen2Config500M(Qwen2Config):
    """0.49 B parameters, the embedding counted once (tied)."""

    num_layers: int = 24
    hidden_size: int = 896
    num_attention_heads: int = 14
    num_query_groups: Optional[int] = 2
    ffn_hidden_size: Optional[int] = 4864
    # NeMo 2.0 unties it, which makes 0.63 B parameters of a released 0.49 B.
    share_embeddings_and_output_weights: bool = True


@configurable
@dataclass
class Qwen2Config1P5B(Qwen2Config):
    """1.54 B parameters, the embedding counted once (tied)."""

    num_layers: int = 28
    hidden_size: int = 1536
    num_attention_heads: int = 12
    num_query_groups: Optional[int] = 2
    ffn_hidden_size: Optional[int] = 8960
    share_embeddings_and_output_weights: bool = True


@configurable
@dataclass
class Qwen2Config7B(Qwen2Config):
    """7.62 B parameters."""

    num_layers: int = 28
    hidden_size: int = 3584
    num_attention_heads: int = 28
    num_query_groups: Optional[int] = 4
    ffn_hidden_size: Optional[int] = 18944
    vocab_size: Optional[int] = 152064


@configurable
@dataclass
class Qwen2Config72B(Qwen2Config):
    """72.7 B parameters."""

    num_layers: int = 80
    hidden_size: int = 8192
    num_attention_heads: int = 64
    num_query_groups: Optional[int] = 8
    ffn_hidden_size: Optional[int] = 29568
    vocab_size: Optional[int] = 152064
    layernorm_epsilon: float = 1e-5


# Qwen 2.5: some sizes are those of Qwen 2, trained on longer sequences.
@configurable
@dataclass
class Qwen25Config500M(Qwen2Config500M):
    """0.49 B parameters, the embedding counted once (tied); 32,768 tokens of context."""

    seq_length: int = 32768


@configurable
@dataclass
class Qwen25Config1P5B(Qwen2Config1P5B):
    """1.54 B parameters, the embedding counted once (tied); 131,072 tokens of context."""

    seq_length: int = 131072


@configurable
@dataclass
class Qwen25Config3B(Qwen2Config):
    """3.09 B parameters, the embedding counted once (tied)."""

    num_layers: int = 36
    hidden_size: int = 2048
    num_attention_heads: int = 16
    num_query_groups: Optional[int] = 2
    ffn_hidden_size: Optional[int] = 11008
    share_embeddings_and_output_weights: bool = True


@configurable
@dataclass
class Qwen25Config7B(Qwen2Config7B):
    """7.62 B parameters; 131,072 tokens of context."""

    seq_length: int = 131072


@configurable
@dataclass
class Qwen25Config14B(Qwen2Config):
    """14.8 B parameters; 131,072 tokens of context."""

    num_layers: int = 48
    hidden_size: int = 5120
    num_attention_heads: int = 40
    num_query_groups: Optional[int] = 8
    ffn_hidden_size: Optional[int] = 13824
    vocab_size: Optional[int] = 152064
    layernorm_epsilon: float = 1e-5
    seq_length: int = 131072


@configurable
@dataclass
class Qwen25Config32B(Qwen25Config14B):
    """32.8 B parameters; deeper and wider than 14B, which it equals otherwise."""

    num_layers: int = 64
    ffn_hidden_size: Optional[int] = 27648


@configurable
@dataclass
class Qwen25Config72B(Qwen2Config72B):
    """72.7 B parameters; 131,072 tokens of context."""

    seq_length: int = 131072


@configurable
class Qwen2Model(GPTModel):
    """The LightningModule of Qwen 2 and 2.5; see `GPTModel`."""
