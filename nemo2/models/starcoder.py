# SPDX-License-Identifier: Apache-2.0
"""StarCoder: GPT-2's decoder with one key-value head for all queries.

Sources: arXiv:2305.06161, table 1; the released config.json of bigcode/starcoder.
"""

import torch.nn.functional as F

from nemo2.models.gpt import GPTConfig, GPTModel


class StarcoderConfig(
    GPTConfig,
    # With the fusion below, Megatron-Core computes the tanh approximation, as bigcode/tiny_starcoder_py does.
    activation_func=F.gelu,
    seq_length=8192,
    hidden_dropout=0.2,
    attention_dropout=0.2,
    init_method_std=0.01,
    # NeMo 2.0 unties it, which adds 0.3 B parameters to the released 15.5 B.
    share_embeddings_and_output_weights=True,
    num_query_groups=1,
    attention_softmax_in_fp32=True,
    bias_activation_fusion=True,
    bias_dropout_fusion=True,
):
    """StarCoder: learned positions, one key-value head for all queries."""


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


class StarcoderModel(GPTModel):
    """The LightningModule of StarCoder; see `GPTModel`."""
