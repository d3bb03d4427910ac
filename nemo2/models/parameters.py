# SPDX-License-Identifier: Apache-2.0
"""How many parameters a GPT has, counted from its config, without building it."""

from typing import Any


def count_parameters(config: Any, vocab_size: int) -> int:
    """Parameters of the whole model, over all ranks, tied embeddings counted once.

    ``config`` is a built ``GPTConfig`` with standard attention, dense or with experts in every layer;
    ``vocab_size`` are the embedding's rows, with their padding if that is to be counted.
    """
    hidden, heads = config.hidden_size, config.num_attention_heads
    head_dim = config.kv_channels or hidden // heads
    qkv = (heads + 2 * (config.num_query_groups or heads)) * head_dim
    attention = hidden * qkv + heads * head_dim * hidden
    experts = config.num_moe_experts
    ffn = (config.moe_ffn_hidden_size if experts else None) or config.ffn_hidden_size
    widening = 2 if config.gated_linear_unit else 1
    mlp = (widening + 1) * hidden * ffn
    if config.add_bias_linear:
        mlp += widening * ffn + hidden
        attention += hidden
    if config.add_bias_linear or config.add_qkv_bias:
        attention += qkv
    if experts:
        shared = config.moe_shared_expert_intermediate_size or 0
        mlp = experts * mlp + (widening + 1) * hidden * shared + hidden * experts
    norm = hidden if config.normalization == "RMSNorm" else 2 * hidden
    embedding = vocab_size * hidden
    if config.position_embedding_type == "learned_absolute":
        embedding += config.seq_length * hidden
    output = 0 if config.share_embeddings_and_output_weights else vocab_size * hidden
    qk_norm = 0
    if config.qk_layernorm:
        qk_norm = 2 * (head_dim if config.normalization == "RMSNorm" else 2 * head_dim)
    return config.num_layers * (attention + mlp + 2 * norm + qk_norm) + norm + embedding + output
