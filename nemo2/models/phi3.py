# SPDX-License-Identifier: Apache-2.0
"""Phi-3 mini: Llama's decoder at 3.8 B parameters, with a window.

Sources: arXiv:2404.14219, section 2; config.json of microsoft/Phi-3-mini-4k-instruct, whose ``sliding_window`` is 2,047.
Microsoft's own code applies it under flash attention only, transformers' class always, as is done here; without the window
the model is the same up to 2,047 tokens, and another one beyond.
"""

from dataclasses import dataclass
from typing import Optional, Union

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
    # A token and the 2,046 before it; NeMo 2.0 has no window.
    window_size: Optional[tuple[int, int]] = (2046, 0)
    # Transformer Engine splits a sequence with a window over context-parallel ranks only by all-to-all.
    cp_comm_type: Optional[Union[str, list[str]]] = "a2a"


@configurable
class Phi3Model(GPTModel):
    """The LightningModule of Phi-3; see `GPTModel`."""
