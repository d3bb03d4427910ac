# SPDX-License-Identifier: Apache-2.0
"""Qwen 3, dense and with experts: Qwen 2's decoder with normalised queries and keys in place of the biases.

Sources: arXiv:2505.09388, tables 1 and 2; the released config.json files of Qwen/Qwen3-*.
"""

from dataclasses import dataclass
from typing import Literal, Optional, Union

from nemo2.config.capture import configurable
from nemo2.models.gpt import GPTModel
from nemo2.models.qwen2 import Qwen2Config


@configurable
@dataclass
class Qwen3Config(Qwen2Config):
    """Settings that all sizes of Qwen 3 share: heads of 128 channels for every width, an RMSNorm on each query and
    key."""

    add_qkv_bias: bool = False
    qk_layernorm: bool = True
    kv_channels: Optional[int] = 128
    num_query_groups: Optional[int] = 8
    max_position_embeddings: int = 40960
    """The longest sequence in the config.json of exported weights. Training does not read it."""


@configurable
@dataclass
class Qwen3MoEConfig(Qwen3Config):
    """Settings that the sizes with experts share: 128 experts in every layer, eight per token."""

    num_moe_experts: Optional[int] = 128
    moe_router_load_balancing_type: Union[str, list[str]] = "aux_loss"
    moe_aux_loss_coeff: Union[float, list[float]] = 1e-3
    moe_router_topk: int = 8
    moe_router_pre_softmax: bool = False
    moe_grouped_gemm: bool = True
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = "alltoall"
    moe_permute_fusion: bool = True


@configurable
@dataclass
class Qwen3Config600M(Qwen3Config):
    """0.60 B parameters, the embedding counted once (tied)."""

    num_layers: int = 28
    hidden_size: int = 1024
    num_attention_heads: int = 16
    ffn_hidden_size: Optional[int] = 3072
    share_embeddings_and_output_weights: bool = True


@configurable
@dataclass
class Qwen3Config1P7B(Qwen3Config):
    """1.72 B parameters, the embedding counted once (tied)."""

    num_layers: int = 28
    hidden_size: int = 2048
    num_attention_heads: int = 16
    ffn_hidden_size: Optional[int] = 6144
    share_embeddings_and_output_weights: bool = True


@configurable
@dataclass
class Qwen3Config4B(Qwen3Config):
    """4.02 B parameters, the embedding counted once (tied)."""

    num_layers: int = 36
    hidden_size: int = 2560
    num_attention_heads: int = 32
    ffn_hidden_size: Optional[int] = 9728
    share_embeddings_and_output_weights: bool = True


@configurable
@dataclass
class Qwen3Config8B(Qwen3Config):
    """8.19 B parameters."""

    num_layers: int = 36
    hidden_size: int = 4096
    num_attention_heads: int = 32
    ffn_hidden_size: Optional[int] = 12288


@configurable
@dataclass
class Qwen3Config14B(Qwen3Config):
    """14.8 B parameters."""

    num_layers: int = 40
    hidden_size: int = 5120
    num_attention_heads: int = 40
    ffn_hidden_size: Optional[int] = 17408


@configurable
@dataclass
class Qwen3Config32B(Qwen3Config):
    """32.8 B parameters."""

    num_layers: int = 64
    hidden_size: int = 5120
    num_attention_heads: int = 64
    ffn_hidden_size: Optional[int] = 25600


@configurable
@dataclass
class Qwen3Config30B_A3B(Qwen3MoEConfig):
    """30.5 B parameters, 3.3 B of them used per token."""

    num_layers: int = 48
    hidden_size: int = 2048
    num_attention_heads: int = 32
    num_query_groups: Optional[int] = 4
    ffn_hidden_size: Optional[int] = 6144
    moe_ffn_hidden_size: Optional[int] = 768


@configurable
@dataclass
class Qwen3Config235B_A22B(Qwen3MoEConfig):
    """235.1 B parameters, 22 B of them used per token."""

    num_layers: int = 94
    hidden_size: int = 4096
    num_attention_heads: int = 64
    num_query_groups: Optional[int] = 4
    ffn_hidden_size: Optional[int] = 12288
    moe_ffn_hidden_size: Optional[int] = 1536


@configurable
class Qwen3Model(GPTModel):
    """The LightningModule of Qwen 3; see `GPTModel`."""
