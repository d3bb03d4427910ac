# SPDX-License-Identifier: Apache-2.0
"""Gemma 2: every other layer attends to the last 4,096 tokens only; norms also after each block; soft-capped scores and
logits.

Sources: arXiv:2408.00118, tables 1 and 2 and section 2; the released config.json files of google/gemma-2-*.
"""

from dataclasses import dataclass
from typing import Optional, Union

from nemo2.config.capture import configurable
from nemo2.models.gemma import GemmaConfig
from nemo2.models.gpt import GPTModel


@configurable
@dataclass
class Gemma2Config(GemmaConfig):
    """Settings that all sizes of Gemma 2 share."""

    vocab_size: Optional[int] = 256000
    # A token and the 4,095 before it. NeMo 2.0 has (4096, 0) in all layers: one token more than the released models
    # were trained with, and no full layers.
    window_size: Optional[tuple[int, int]] = (4095, 0)
    window_attn_skip_freq: Optional[Union[int, list[int]]] = 2
    query_pre_attn_scalar: int = 224
    """Scores are divided by the square root of this number rather than by that of the channels per head."""
    attn_logit_softcapping: Optional[float] = 50.0
    """The cap of scores: they become ``c * tanh(score / c)`` before the softmax. None: no cap."""
    final_logit_softcapping: Optional[float] = 30.0
    """The same cap for the output layer's logits. None: no cap."""
    post_sublayer_layernorm: bool = True
    """Add a norm after attention and after the feed-forward block, before each is added to the residual stream."""

    def __post_init__(self) -> None:
        if self.softmax_scale is None:
            self.softmax_scale = self.query_pre_attn_scalar**-0.5
        super().__post_init__()


class Gemma2Config2B(
    Gemma2Config,
    num_layers=26,
    hidden_size=2304,
    num_attention_heads=8,
    num_query_groups=4,
    ffn_hidden_size=9216,
    query_pre_attn_scalar=256,
):
    """2.61 B parameters."""


class Gemma2Config9B(
    Gemma2Config,
    num_layers=42,
    hidden_size=3584,
    num_attention_heads=16,
    num_query_groups=8,
    ffn_hidden_size=14336,
    query_pre_attn_scalar=256,
):
    """9.24 B parameters."""


class Gemma2Config27B(
    Gemma2Config,
    num_layers=46,
    hidden_size=4608,
    num_attention_heads=32,
    kv_channels=128,
    num_query_groups=16,
    ffn_hidden_size=36864,
    query_pre_attn_scalar=144,
):
    """27.2 B parameters."""


class Gemma2Model(GPTModel):
    """The LightningModule of Gemma 2; see `GPTModel`."""
