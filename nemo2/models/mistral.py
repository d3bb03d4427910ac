# SPDX-License-Identifier: Apache-2.0
"""Mistral 7B, Mistral NeMo 12B and Mistral Large 123B.

Sources: arXiv:2310.06825, table 1; the released config.json files of mistralai/Mistral-7B-v0.1,
Mistral-Nemo-Base-2407 and Mistral-Large-Instruct-2407.
"""

from nemo2.models.decoder import DecoderConfig
from nemo2.models.gpt import GPTModel


class MistralConfig7B(
    DecoderConfig,
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    num_query_groups=8,
    ffn_hidden_size=14336,
    seq_length=32768,
    window_size=(4095, 0),
    # Transformer Engine splits a sequence with a window over context-parallel ranks only by all-to-all.
    cp_comm_type="a2a",
):
    """7.24 B parameters with the 32,000-token vocabulary; a token attends to itself and the 4,095 before it."""


class MistralNeMoConfig12B(
    MistralConfig7B,
    num_layers=40,
    hidden_size=5120,
    kv_channels=128,
    seq_length=4096,
    window_size=None,
    cp_comm_type=None,
    rotary_base=1_000_000,
):
    """12.25 B parameters with the 131,072-token vocabulary; heads narrower than hidden_size / heads."""


class MistralNeMoConfig123B(
    MistralNeMoConfig12B, num_layers=88, hidden_size=12288, ffn_hidden_size=28672, num_attention_heads=96
):
    """122.6 B parameters with the 32,768-token vocabulary (Mistral Large 2)."""


class MistralModel(GPTModel):
    """The LightningModule of Mistral; see `GPTModel`."""

    default_config = MistralConfig7B
