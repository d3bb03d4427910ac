# SPDX-License-Identifier: Apache-2.0
"""ChatGLM 2 and 3, 6B: half of each head's channels rotated, adjacent channels in pairs; two key-value groups.

Source: config.json and modeling_chatglm.py of THUDM/chatglm2-6b and chatglm3-6b.
"""

from nemo2.models.decoder import DecoderConfig
from nemo2.models.gpt import GPTModel


class ChatGLMConfig(
    DecoderConfig,
    num_layers=28,
    hidden_size=4096,
    ffn_hidden_size=13696,
    num_attention_heads=32,
    num_query_groups=2,
    add_qkv_bias=True,
    rotary_percent=0.5,
    rotary_interleaved=True,
    # The released vocabulary contains its padding, so none is added.
    make_vocab_size_divisible_by=65024,
):
    """6.24 B parameters with the 65,024-token vocabulary."""


class ChatGLM2Config6B(ChatGLMConfig, seq_length=32768):
    """ChatGLM 2: 32,768 tokens of context."""


class ChatGLM3Config6B(ChatGLMConfig, seq_length=8192):
    """ChatGLM 3: 8,192 tokens of context."""


class ChatGLMModel(GPTModel):
    """The LightningModule of ChatGLM; see `GPTModel`."""

    default_config = ChatGLMConfig
