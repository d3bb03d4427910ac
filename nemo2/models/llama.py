# SPDX-License-Identifier: Apache-2.0
"""Llama 2, 3, 3.1 and 3.2, Code Llama: sizes, rotary scaling, LightningModule.

Sizes follow the papers and the model cards named beside them. Initialization and sequence lengths are NeMo 2.0's.
"""

import math
from dataclasses import dataclass
from typing import Any, Optional

from torch import Tensor

from nemo2.config.capture import configurable
from nemo2.models.conversion.decoder import biases, rows, unbiased
from nemo2.models.conversion.positions import KINDS, Rope, positions, positions_of, rope_fields, rope_of, scaled
from nemo2.models.conversion.settings import NEEDED, Config, decoder_fields, read, said, written
from nemo2.models.conversion.table import Conversion
from nemo2.models.decoder import DecoderConfig
from nemo2.models.gpt import GPTModel


@configurable
@dataclass
class LlamaConfig(DecoderConfig):
    """Settings that all Llama models share."""

    seq_length: int = 4096
    bias_activation_fusion: bool = True
    persist_layer_norm: bool = True
    bias_dropout_fusion: bool = True
    apply_rope_fusion: bool = True


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
    LlamaConfig,
    num_layers=48,
    hidden_size=8192,
    num_attention_heads=64,
    num_query_groups=8,
    ffn_hidden_size=22016,
    rotary_base=1_000_000,
    seq_length=16384,
):
    """33.7 B parameters with the 32,000-token vocabulary; grouped-query attention."""


@configurable
@dataclass
class CodeLlamaConfig70B(Llama2Config70B):
    """68.98 B parameters with the 32,016-token vocabulary; base and sequence length are Llama 2's."""


# Llama 3 and 3.1: arXiv:2407.21783, table 3; vocabulary 128,256; rotary base 500,000.
@configurable
@dataclass
class Llama3Config(LlamaConfig):
    """Settings that all sizes of Llama 3 share: eight key-value groups, the rotary base, the training length."""

    seq_length: int = 8192
    rotary_base: int = 500_000
    num_query_groups: Optional[int] = 8
    init_method_std: float = 0.01


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

    See `scale_rotary_frequencies` for the meaning of the four numbers.
    """

    seq_length: int = 131072
    scale_factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    old_context_len: int = 8192
    init_method_std: float = 0.02

    def customize_model(self, model: Any) -> None:
        super().customize_model(model)
        # Megatron-Core's `rope_scaling` fixes three of the four numbers.
        model.rotary_pos_emb.inv_freq = scale_rotary_frequencies(
            model.rotary_pos_emb.inv_freq,
            scale_factor=self.scale_factor,
            low_freq_factor=self.low_freq_factor,
            high_freq_factor=self.high_freq_factor,
            old_context_len=self.old_context_len,
        )


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


class Llama32Config3B(
    Llama31Config,
    scale_factor=32.0,
    share_embeddings_and_output_weights=True,
    num_layers=28,
    hidden_size=3072,
    ffn_hidden_size=8192,
    num_attention_heads=24,
):
    """3.21 B parameters with the 128,256-token vocabulary, counted once (tied)."""


@configurable
class LlamaModel(GPTModel):
    """The LightningModule of Llama; see `GPTModel`."""


def scale_rotary_frequencies(
    frequencies: Tensor,
    *,
    scale_factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    old_context_len: int,
) -> Tensor:
    """Llama 3.1's rotary frequencies: a new tensor of the same shape, in radians per position.

    A frequency with more than ``high_freq_factor`` turns within ``old_context_len`` positions stays. A frequency with
    fewer than ``low_freq_factor`` turns is divided by ``scale_factor``. Between the two, the result changes linearly
    with the number of turns, or jumps if both factors are equal (Llama 4). Source: ``apply_scaling`` in
    meta-llama/llama-models, ``llama3/model.py``.
    """
    turns = old_context_len * frequencies / (2 * math.pi)
    if high_freq_factor == low_freq_factor:
        unscaled = (turns >= low_freq_factor).to(frequencies.dtype)
    else:
        unscaled = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0)
    return frequencies * (unscaled + (1.0 - unscaled) / scale_factor)


_FIELDS = decoder_fields()
_ONLY = {"model_type": "llama", "hidden_act": "silu"}
SCALING: dict[str, tuple[str, Any]] = {
    "factor": ("scale_factor", NEEDED),
    "low_freq_factor": ("low_freq_factor", NEEDED),
    "high_freq_factor": ("high_freq_factor", NEEDED),
    "original_max_position_embeddings": ("old_context_len", NEEDED),
}


def _config(hf: Config) -> LlamaConfig:
    rope = rope_of(hf, kinds=(*KINDS, "llama3"))
    fields = {**read(hf, _FIELDS, only=_ONLY), **biases(hf)}
    fields |= own_positions(hf, rope, longest=fields["seq_length"])
    return (Llama31Config if rope.kind == "llama3" else LlamaConfig)(**fields)


def _hf_config(ours: LlamaConfig) -> dict[str, Any]:
    bias = ours.add_bias_linear
    hf = {**written(ours, _FIELDS, only=_ONLY), "attention_bias": bias, "mlp_bias": bias, **own_positions_of(ours)}
    return said(ours, hf, _config)


def own_positions(hf: Config, rope: Rope, *, longest: int) -> dict[str, Any]:
    """nemo2's rotary settings, including those of Llama 3.1's scaling."""
    settings = positions(hf, rope, longest=longest)
    return settings | scaled(hf, rope, SCALING) if rope.kind == "llama3" else settings


def own_positions_of(ours: Any) -> dict[str, Any]:
    """The inverse of `own_positions`."""
    if isinstance(ours, Llama31Config):
        scaling = {theirs: getattr(ours, name) for theirs, (name, _) in SCALING.items()}
        return rope_fields(ours.rotary_base, kind="llama3", **scaling)
    return positions_of(ours)


LLAMA = Conversion(
    architectures=("LlamaForCausalLM",),
    model=LlamaModel,
    configs=(LlamaConfig,),
    rows=rows,
    config=_config,
    hf_config=_hf_config,
    unbiased=unbiased,
    ignored=("model.layers.*.self_attn.rotary_emb.inv_freq",),
)
