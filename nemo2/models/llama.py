# SPDX-License-Identifier: Apache-2.0
"""Llama 2, 3, 3.1 and 3.2, Code Llama: sizes, rotary scaling, LightningModule.

Sizes follow the papers and the model cards named beside them. Initialization and sequence lengths are NeMo 2.0's.
"""

from dataclasses import dataclass
from typing import Any

from nemo2.config.capture import configurable
from nemo2.models.decoder import DecoderConfig
from nemo2.models.gpt import GPTModel
from nemo2.models.rotary import scale_positions


class LlamaConfig(
    DecoderConfig,
    seq_length=4096,
    bias_activation_fusion=True,
    persist_layer_norm=True,
    bias_dropout_fusion=True,
    apply_rope_fusion=True,
):
    """Settings that all Llama models share."""


# Llama 2: arXiv:2307.09288, table 1 and appendix A.2.1; widths from the released params.json files.
class Llama2Config7B(
    LlamaConfig, num_layers=32, hidden_size=4096, num_attention_heads=32, num_query_groups=32, ffn_hidden_size=11008
):
    """6.74 B parameters with the 32,000-token vocabulary."""


class Llama2Config13B(
    LlamaConfig, num_layers=40, hidden_size=5120, num_attention_heads=40, num_query_groups=40, ffn_hidden_size=13824
):
    """13.02 B parameters with the 32,000-token vocabulary."""


class Llama2Config70B(
    LlamaConfig, num_layers=80, hidden_size=8192, num_attention_heads=64, num_query_groups=8, ffn_hidden_size=28672
):
    """68.98 B parameters with the 32,000-token vocabulary; grouped-query attention."""


# Code Llama: arXiv:2308.12950; Llama 2, trained further with a rotary base of a million.
class CodeLlamaConfig7B(Llama2Config7B, rotary_base=1_000_000, seq_length=16384):
    """6.74 B parameters with the 32,016-token vocabulary."""


class CodeLlamaConfig13B(Llama2Config13B, rotary_base=1_000_000, seq_length=16384):
    """13.02 B parameters with the 32,016-token vocabulary."""


class CodeLlamaConfig34B(
    Llama2Config70B, num_layers=48, ffn_hidden_size=22016, rotary_base=1_000_000, seq_length=16384
):
    """33.7 B parameters with the 32,000-token vocabulary; grouped-query attention."""


class CodeLlamaConfig70B(Llama2Config70B, rotary_base=1_000_000, seq_length=16384):
    """68.98 B parameters with the 32,016-token vocabulary. The Python and Instruct releases have Llama 2's rotary base and
    sequence length, 10,000 and 4,096 (meta-llama/codellama, issue 188)."""


# Llama 3 and 3.1: arXiv:2407.21783, table 3; vocabulary 128,256; rotary base 500,000.
class Llama3Config(LlamaConfig, seq_length=8192, rotary_base=500_000, num_query_groups=8, init_method_std=0.01):
    """Settings that all sizes of Llama 3 share: eight key-value groups, the rotary base, the training length."""


class Llama3Config8B(Llama3Config, num_layers=32, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32):
    """8.03 B parameters with the 128,256-token vocabulary."""


class Llama3Config70B(
    Llama3Config,
    num_layers=80,
    hidden_size=8192,
    ffn_hidden_size=28672,
    num_attention_heads=64,
    init_method_std=0.008944,
):
    """70.6 B parameters with the 128,256-token vocabulary."""


@configurable
@dataclass
class Llama31Config(Llama3Config):
    """Llama 3.1: rotary frequencies scaled for a longer context than that of the first training.

    See `nemo2.models.rotary.scale_rotary_frequencies` for the meaning of the four numbers.
    """

    seq_length: int = 131072
    scale_factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    old_context_len: int = 8192
    init_method_std: float = 0.02

    def customize_model(self, model: Any) -> None:
        super().customize_model(model)
        scale_positions(model, self, scale_factor=self.scale_factor)


class Llama31Config8B(Llama31Config, num_layers=32, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32):
    """8.03 B parameters with the 128,256-token vocabulary, 131,072 tokens of context."""


class Llama31Config70B(Llama31Config, num_layers=80, hidden_size=8192, ffn_hidden_size=28672, num_attention_heads=64):
    """70.6 B parameters with the 128,256-token vocabulary, 131,072 tokens of context."""


class Llama31Config405B(
    Llama31Config, num_layers=126, hidden_size=16384, ffn_hidden_size=53248, num_attention_heads=128
):
    """405.9 B parameters with the 128,256-token vocabulary, 131,072 tokens of context."""


# Llama 3.2: the model cards of meta-llama/Llama-3.2-1B and -3B; tied embeddings, rotary scale 32.
class Llama32Config1B(
    Llama31Config,
    scale_factor=32.0,
    share_embeddings_and_output_weights=True,
    num_layers=16,
    hidden_size=2048,
    ffn_hidden_size=8192,
    num_attention_heads=32,
):
    """1.24 B parameters with the 128,256-token vocabulary, counted once (tied)."""


class Llama32Config3B(Llama32Config1B, num_layers=28, hidden_size=3072, num_attention_heads=24):
    """3.21 B parameters with the 128,256-token vocabulary, counted once (tied)."""


class LlamaModel(GPTModel):
    """The LightningModule of Llama; see `GPTModel`."""
