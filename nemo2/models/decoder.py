# SPDX-License-Identifier: Apache-2.0
"""Settings that most open decoders since Llama share, so that a family states only its differences."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F

from nemo2.config.capture import configurable
from nemo2.models.gpt import GPTConfig


@configurable
@dataclass
class DecoderConfig(GPTConfig):
    """RMSNorm before each block, SwiGLU, rotary positions; no biases, no dropout, an output layer of its own.

    Source: Touvron et al. 2023, arXiv:2302.13971, section 2.2.
    """

    normalization: str = "RMSNorm"
    activation_func: Callable = F.silu
    gated_linear_unit: bool = True
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "rope"
    add_bias_linear: bool = False
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    share_embeddings_and_output_weights: bool = False
