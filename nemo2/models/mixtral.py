# SPDX-License-Identifier: Apache-2.0
"""Mixtral: Mistral's decoder with eight experts in every layer, of which each token uses two.

Sources: arXiv:2401.04088, table 1; the released config.json files of mistralai/Mixtral-8x7B-v0.1 and 8x22B-v0.1.
"""

from dataclasses import dataclass
from typing import Literal, Optional, Union

from nemo2.config.capture import configurable
from nemo2.models.decoder import DecoderConfig
from nemo2.models.gpt import GPTModel


@configurable
@dataclass
class MixtralConfig(DecoderConfig):
    """Settings that all Mixtral models share; the default sizes are those of 8x7B."""

    num_layers: int = 32
    hidden_size: int = 4096
    num_attention_heads: int = 32
    num_query_groups: Optional[int] = 8
    ffn_hidden_size: Optional[int] = 14336
    max_position_embeddings: int = 4096
    """The longest sequence in the config.json of exported weights. Training does not read it."""
    seq_length: int = 4096
    num_moe_experts: Optional[int] = 8
    moe_aux_loss_coeff: Union[float, list[float]] = 0.01
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = "alltoall"
    rotary_base: int = 1_000_000
    apply_rope_fusion: bool = True
    bias_activation_fusion: bool = True
    bias_dropout_fusion: bool = True
    masked_softmax_fusion: bool = False


class MixtralConfig8x3B(MixtralConfig, hidden_size=2560, ffn_hidden_size=8960):
    """18.3 B parameters with the 32,000-token vocabulary. NVIDIA's size for benchmarks; no weights exist."""


class MixtralConfig8x7B(MixtralConfig):
    """46.7 B parameters with the 32,000-token vocabulary, 12.9 B of them used per token."""


class MixtralConfig8x22B(MixtralConfig, num_layers=56, hidden_size=6144, num_attention_heads=48, ffn_hidden_size=16384):
    """140.6 B parameters with the 32,000-token vocabulary, 39 B of them used per token."""


class MixtralModel(GPTModel):
    """The LightningModule of Mixtral; see `GPTModel`."""

    default_config = MixtralConfig8x7B
