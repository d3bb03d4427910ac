# SPDX-License-Identifier: Apache-2.0
"""StarCoder 2: LayerNorm, GELU and biases; rotary positions, a sliding window and few key-value groups.

Sources: arXiv:2402.19173, table 6; the released config.json files of bigcode/starcoder2-*.
"""

import torch.nn.functional as F

from nemo2.models.gpt import GPTConfig, GPTModel


class Starcoder2Config(
    GPTConfig,
    # With the fusion below, the tanh approximation, as in StarCoder.
    activation_func=F.gelu,
    seq_length=16384,
    position_embedding_type="rope",
    # NeMo 2.0 has no window, and so differs from the 4,097th token on.
    window_size=(4095, 0),
    # Transformer Engine splits a sequence with a window over context-parallel ranks only by all-to-all.
    cp_comm_type="a2a",
    hidden_dropout=0.0,
    attention_dropout=0.0,
    init_method_std=0.01,
    share_embeddings_and_output_weights=False,
    attention_softmax_in_fp32=True,
    bias_activation_fusion=True,
    bias_dropout_fusion=True,
):
    """StarCoder 2: rotary positions; a token attends to itself and the 4,095 before it (arXiv:2402.19173, section 6.1)."""


class Starcoder2Config3B(
    Starcoder2Config,
    num_layers=30,
    hidden_size=3072,
    ffn_hidden_size=12288,
    num_query_groups=2,
    num_attention_heads=24,
    init_method_std=0.018042,
    share_embeddings_and_output_weights=True,
):
    """3.03 B parameters with the 49,152-token vocabulary, the embedding counted once (tied)."""

    rotary_base: float = 999999.4420358813


class Starcoder2Config7B(
    Starcoder2Config,
    num_layers=32,
    hidden_size=4608,
    ffn_hidden_size=18432,
    num_query_groups=4,
    num_attention_heads=36,
    init_method_std=0.018042,
    rotary_base=1_000_000,
    share_embeddings_and_output_weights=True,
):
    """7.17 B parameters with the 49,152-token vocabulary, the embedding counted once (tied)."""


class Starcoder2Config15B(
    Starcoder2Config,
    num_layers=40,
    hidden_size=6144,
    ffn_hidden_size=24576,
    num_query_groups=4,
    num_attention_heads=48,
    init_method_std=0.01275,
    rotary_base=100_000,
):
    """16.0 B parameters with the 49,152-token vocabulary."""


class Starcoder2Model(GPTModel):
    """The LightningModule of StarCoder 2; see `GPTModel`."""
