# SPDX-License-Identifier: Apache-2.0
"""StarCoder: GPT-2's decoder with one key-value head for all queries.

Sources: arXiv:2305.06161, table 1; the released config.json of bigcode/starcoder.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Optional

import torch.nn.functional as F

from nemo2.config.capture import configurable
from nemo2.models.gpt import GPTConfig, GPTModel


@configurable
@dataclass
class StarcoderConfig(GPTConfig):
    """StarCoder: learned positions, one key-value head for all queries."""

    # With the fusion below, Megatron-Core computes the tanh approximation, as bigcode/tiny_starcoder_py does.
    activation_func: Callable = F.gelu
    seq_length: int = 8192
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "learned_absolute"
    hidden_dropout: float = 0.2
    attention_dropout: float = 0.2
    init_method_std: float = 0.01
    # NeMo 2.0 unties it, which adds 0.3 B parameters to the released 15.5 B.
    share_embeddings_and_output_weights: bool = True
    num_query_groups: Optional[int] = 1
    attention_softmax_in_fp32: bool = True
    bias_activation_fusion: bool = True
    bias_dropout_fusion: bool = True


class StarcoderConfig15B(
    StarcoderConfig,
    num_layers=40,
    hidden_size=6144,
    ffn_hidden_size=24576,
    num_attention_heads=48,
    init_method_std=0.02,
    bias_activation_fusion=False,
):
    """15.5 B parameters with the 49,152-token vocabulary, the embedding counted once (tied). Its GELU is exact."""


@configurable
class StarcoderModel(GPTModel):
    """The LightningModule of StarCoder; see `GPTModel`."""
