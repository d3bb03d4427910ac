# SPDX-License-Identifier: Apache-2.0
"""ERNIE 4.5, dense: Llama's decoder with channels rotated in pairs.

Sources: the ERNIE 4.5 technical report, Baidu 2025; transformers' ``Ernie4_5Config``, whose defaults are config.json of
baidu/ERNIE-4.5-0.3B-PT.
"""

from nemo2.models.decoder import DecoderConfig
from nemo2.models.gpt import GPTModel


class ERNIE45Config(
    DecoderConfig,
    seq_length=131072,
    rotary_base=500_000,
    rotary_interleaved=True,
    vocab_size=103424,
    kv_channels=128,
    share_embeddings_and_output_weights=True,
):
    """Settings that all dense sizes of ERNIE 4.5 share."""


class ERNIE45Config300M(
    ERNIE45Config, num_layers=18, hidden_size=1024, num_attention_heads=16, num_query_groups=2, ffn_hidden_size=3072
):
    """0.36 B parameters, the embedding counted once (tied)."""


class ERNIE45Model(GPTModel):
    """The LightningModule of ERNIE 4.5; see `GPTModel`."""
