# SPDX-License-Identifier: Apache-2.0
"""Qwen 3, dense and with experts: Qwen 2's decoder with normalised queries and keys in place of the biases.

Sources: arXiv:2505.09388, tables 1 and 2; the released config.json files of Qwen/Qwen3-*.
"""

from dataclasses import dataclass
from typing import Optional

from nemo2.config.capture import configurable
from nemo2.models.decoder import GroupedExperts
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


class Qwen3MoEConfig(GroupedExperts, Qwen3Config, num_moe_experts=128, moe_aux_loss_coeff=1e-3, moe_router_topk=8):
    """Settings that the sizes with experts share: 128 experts in every layer, eight per token."""


class Qwen3Config600M(
    Qwen3Config,
    num_layers=28,
    hidden_size=1024,
    num_attention_heads=16,
    ffn_hidden_size=3072,
    share_embeddings_and_output_weights=True,
):
    """0.60 B parameters, the embedding counted once (tied)."""


class Qwen3Config1P7B(Qwen3Config600M, hidden_size=2048, ffn_hidden_size=6144):
    """1.72 B parameters, the embedding counted once (tied)."""


class Qwen3Config4B(Qwen3Config600M, num_layers=36, hidden_size=2560, num_attention_heads=32, ffn_hidden_size=9728):
    """4.02 B parameters, the embedding counted once (tied)."""


class Qwen3Config8B(Qwen3Config, num_layers=36, hidden_size=4096, num_attention_heads=32, ffn_hidden_size=12288):
    """8.19 B parameters."""


class Qwen3Config14B(Qwen3Config, num_layers=40, hidden_size=5120, num_attention_heads=40, ffn_hidden_size=17408):
    """14.8 B parameters."""


class Qwen3Config32B(Qwen3Config, num_layers=64, hidden_size=5120, num_attention_heads=64, ffn_hidden_size=25600):
    """32.8 B parameters."""


class Qwen3Config30B_A3B(
    Qwen3MoEConfig,
    num_layers=48,
    hidden_size=2048,
    num_attention_heads=32,
    num_query_groups=4,
    ffn_hidden_size=6144,
    moe_ffn_hidden_size=768,
):
    """30.5 B parameters, 3.3 B of them used per token."""


class Qwen3Config235B_A22B(
    Qwen3MoEConfig,
    num_layers=94,
    hidden_size=4096,
    num_attention_heads=64,
    num_query_groups=4,
    ffn_hidden_size=12288,
    moe_ffn_hidden_size=1536,
):
    """235.1 B parameters, 22 B of them used per token."""


class Qwen3Model(GPTModel):
    """The LightningModule of Qwen 3; see `GPTModel`."""
