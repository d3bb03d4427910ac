# SPDX-License-Identifier: Apache-2.0
"""Baichuan 2 7B: Llama's decoder with a vocabulary of 125,696.

Sources: arXiv:2309.10305, table 2; config.json of baichuan-inc/Baichuan2-7B-Base. The 13B uses ALiBi and is not here.
"""

from dataclasses import dataclass
from typing import Optional

from nemo2.config.capture import configurable
from nemo2.models.decoder import DecoderConfig
from nemo2.models.gpt import GPTModel


@configurable
@dataclass
class Baichuan2Config(DecoderConfig):
    """Settings that all Baichuan 2 models share."""

    seq_length: int = 4096
    init_method_std: float = 0.02
    layernorm_epsilon: float = 1e-6


@configurable
@dataclass
class Baichuan2Config7B(Baichuan2Config):
    """7.51 B parameters with the 125,696-token vocabulary."""

    num_layers: int = 32
    hidden_size: int = 4096
    num_attention_heads: int = 32
    num_query_groups: Optional[int] = 32
    ffn_hidden_size: Optional[int] = 11008


@configurable
class Baichuan2Model(GPTModel):
    """A Baichuan 2 as Lightning and ``MegatronStrategy`` see it; see :class:`GPTModel`."""
