# SPDX-License-Identifier: Apache-2.0
"""SmolLM 3: Llama's decoder, in which every fourth layer has no positions (NoPE, arXiv:2501.18795).

Sources: transformers' ``SmolLM3Config``, whose defaults are config.json of HuggingFaceTB/SmolLM3-3B; the rotary base of its
last stage of training from huggingface.co/blog/smollm3.
"""

from nemo2.models.decoder import DecoderConfig
from nemo2.models.gpt import GPTModel


class SmolLM3Config(
    DecoderConfig,
    seq_length=65536,
    layernorm_epsilon=1e-6,
    rotary_base=5_000_000,
    vocab_size=128256,
    no_rope_freq=4,
    share_embeddings_and_output_weights=True,
):
    """Settings that all sizes of SmolLM 3 share."""

    """Every n-th layer has no positions. A list has an entry per layer: 1 for a layer without positions."""


class SmolLM3Config3B(
    SmolLM3Config, num_layers=36, hidden_size=2048, num_attention_heads=16, num_query_groups=4, ffn_hidden_size=11008
):
    """3.08 B parameters, the embedding counted once (tied)."""


class SmolLM3Model(GPTModel):
    """The LightningModule of SmolLM 3; see `GPTModel`."""
