# SPDX-License-Identifier: Apache-2.0
"""Seed-OSS: Qwen 2's decoder, biases on queries, keys and values, with heads of 128 channels.

Source: transformers' ``SeedOssConfig``, whose defaults are config.json of ByteDance-Seed/Seed-OSS-36B-Base but for its
``hidden_size`` of 5,120.
"""

from nemo2.models.decoder import DecoderConfig
from nemo2.models.gpt import GPTModel


class SeedOSSConfig(
    DecoderConfig,
    add_qkv_bias=True,
    seq_length=524288,
    kv_channels=128,
    num_query_groups=8,
    layernorm_epsilon=1e-6,
    rotary_base=10_000_000,
    vocab_size=155136,
):
    """Settings that all sizes of Seed-OSS share."""


class SeedOSSConfig36B(SeedOSSConfig, num_layers=64, hidden_size=5120, num_attention_heads=80, ffn_hidden_size=27648):
    """36.2 B parameters."""


class SeedOSSModel(GPTModel):
    """The LightningModule of Seed-OSS; see `GPTModel`."""
