# SPDX-License-Identifier: Apache-2.0
"""ChatGLM 2 and 3, 6B: half of each head's channels rotated, adjacent channels in pairs; two key-value groups.

Source: config.json and modeling_chatglm.py of THUDM/chatglm2-6b and chatglm3-6b.
"""

from dataclasses import dataclass
from typing import Optional

from nemo2.config.capture import configurable
from nemo2.models.decoder import DecoderConfig
from nemo2.models.gpt import GPTModel


@configurable
@dataclass
class ChatGLMConfig(DecoderConfig):
    """6.24 B parameters with the 65,024-token vocabulary."""

    num_layers: int = 28
    hidden_size: int = 4096
    ffn_hidden_size: Optional[int] = 13696
    num_attention_heads: int = 32
    num_query_groups: Optional[int] = 2
    add_qkv_bias: bool = True
    rotary_percent: float = 0.5
    rotary_interleaved: bool = True
    # The released vocabulary contains its padding, so none is added.
    make_vocab_size_divisible_by: int = 65024


class ChatGLM2Config6B(ChatGLMConfig, seq_length=32768):
    """ChatGLM 2: 32,768 tokens of context."""


class ChatGLM3Config6B(ChatGLMConfig, seq_length=8192):
    """ChatGLM 3: 8,192 tokens of context."""


@configurable
class ChatGLMModel(GPTModel):
    """The LightningModule of ChatGLM; see `GPTModel`."""

    default_config = ChatGLMConfig
