# SPDX-License-Identifier: Apache-2.0
"""Qwen 2 and 2.5: Llama's decoder with biases on queries, keys and values.

Sources: arXiv:2407.10671, table 1, and arXiv:2412.15115, table 1; vocabularies, norms and tying from the released
config.json files of Qwen/Qwen2-* and Qwen/Qwen2.5-*.
"""

from nemo2.models.decoder import DecoderConfig
from nemo2.models.gpt import GPTModel


class Qwen2Config(
    DecoderConfig, add_qkv_bias=True, seq_length=4096, vocab_size=151936, layernorm_epsilon=1e-6, rotary_base=1_000_000
):
    """Settings that all sizes of Qwen 2 share."""


# NeMo 2.0 unties it, which makes 0.63 B parameters of a released 0.49 B.
class Qwen2Config500M(
    Qwen2Config,
    num_layers=24,
    hidden_size=896,
    num_attention_heads=14,
    num_query_groups=2,
    ffn_hidden_size=4864,
    share_embeddings_and_output_weights=True,
):
    """0.49 B parameters, the embedding counted once (tied)."""


class Qwen2Config1P5B(Qwen2Config500M, num_layers=28, hidden_size=1536, num_attention_heads=12, ffn_hidden_size=8960):
    """1.54 B parameters, the embedding counted once (tied)."""


class Qwen2Config7B(
    Qwen2Config,
    num_layers=28,
    hidden_size=3584,
    num_attention_heads=28,
    num_query_groups=4,
    ffn_hidden_size=18944,
    vocab_size=152064,
):
    """7.62 B parameters."""


class Qwen2Config72B(
    Qwen2Config,
    num_layers=80,
    hidden_size=8192,
    num_attention_heads=64,
    num_query_groups=8,
    ffn_hidden_size=29568,
    vocab_size=152064,
    layernorm_epsilon=1e-5,
):
    """72.7 B parameters."""


# Qwen 2.5: some sizes are those of Qwen 2, trained on longer sequences.
class Qwen25Config500M(Qwen2Config500M, seq_length=32768):
    """0.49 B parameters, the embedding counted once (tied); 32,768 tokens of context."""


class Qwen25Config1P5B(Qwen2Config1P5B, seq_length=131072):
    """1.54 B parameters, the embedding counted once (tied); 131,072 tokens of context."""


class Qwen25Config3B(Qwen2Config500M, num_layers=36, hidden_size=2048, num_attention_heads=16, ffn_hidden_size=11008):
    """3.09 B parameters, the embedding counted once (tied)."""


class Qwen25Config7B(Qwen2Config7B, seq_length=131072):
    """7.62 B parameters; 131,072 tokens of context."""


class Qwen25Config14B(
    Qwen2Config,
    num_layers=48,
    hidden_size=5120,
    num_attention_heads=40,
    num_query_groups=8,
    ffn_hidden_size=13824,
    vocab_size=152064,
    layernorm_epsilon=1e-5,
    seq_length=131072,
):
    """14.8 B parameters; 131,072 tokens of context."""


class Qwen25Config32B(Qwen25Config14B, num_layers=64, ffn_hidden_size=27648):
    """32.8 B parameters; deeper and wider than 14B, which it equals otherwise."""


class Qwen25Config72B(Qwen2Config72B, seq_length=131072):
    """72.7 B parameters; 131,072 tokens of context."""


class Qwen2Model(GPTModel):
    """The LightningModule of Qwen 2 and 2.5; see `GPTModel`."""
