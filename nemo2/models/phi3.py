# SPDX-License-Identifier: Apache-2.0
"""Phi-3 mini: Llama's decoder at 3.8 B parameters.

Sources: arXiv:2404.14219, section 2; config.json of microsoft/Phi-3-mini-4k-instruct.
"""

from dataclasses import dataclass
from typing import Optional

from nemo2.config.capture import configurable
from nemo2.models.decoder import DecoderConfig
from nemo2.models.gpt import GPTModel


@configurable
@dataclass
class Phi3Config(DecoderConfig):
    """Settings that all Phi-3 models share."""

    seq_length: int = 4096


@configurable
@dataclass
class Phi3ConfigMini(Phi3Config):
    """3.82 B parameters with the 32,064-token vocabulary."""

    num_layers: int = 32
    hidden_size: int = 3072
    ffn_hidden_size: Optional[int] = 8192
    num_attention_heads: int = 32
    num_query_groups: Optional[int] = 32
    rotary_base: int = 10_000
    vocab_size: Optional[int] = 32064


@configurable
class Phi3Model(GPTModel):
    """A Phi-3 as Lightning and ``MegatronStrategy`` see it; see :class:`GPTModel`."""
