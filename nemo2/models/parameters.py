# SPDX-License-Identifier: Apache-2.0
"""How many parameters a model has, counted from its config, without building it."""

from typing import Any


def count_parameters(config: Any, vocab_size: int) -> int:
    """Parameters of the whole model, over all ranks, tied embeddings counted once.

    ``config`` is a built ``GPTConfig``, of a family with experts, latent attention, layers of different widths or a
    hybrid pattern too; ``vocab_size`` are the embedding's rows, with their padding if that is to be counted.
    """
    hidden = config.hidden_size
    embedding = vocab_size * hidden
    if config.position_embedding_type == "learned_absolute":
        embedding += config.seq_length * hidden
    output = 0 if config.share_embeddings_and_output_weights else vocab_size * hidden
    return _layers(config) + _norm(config, hidden) + embedding + output


def _layers(config: Any) -> int:
    pattern = getattr(config, "hybrid_override_pattern", None)
    if pattern is not None:
        sizes = {"M": _mixer, "-": _mlp, "*": _attention}
        return sum(_norm(config, config.hidden_size) + sizes[kind](config) for kind in pattern)
    if getattr(config, "heterogeneous_block_specs", False):
        return sum(_uneven_layer(config, block) for block in config.per_block_parameters)
    kinds = _has_experts(config)
    # A multi-token-prediction depth is a layer like the last, three norms, and a projection of two states into one.
    depths = getattr(config, "mtp_num_layers", None) or 0
    depth = 2 * config.hidden_size**2 + 3 * _norm(config, config.hidden_size)
    return sum(_layer(config, kind) for kind in kinds + kinds[-1:] * depths) + depths * depth


def _layer(config: Any, has_experts: bool) -> int:
    norms = 4 if getattr(config, "post_sublayer_layernorm", False) else 2
    mlp = _experts(config) if has_experts else _mlp(config)
    return _attention(config) + mlp + norms * _norm(config, config.hidden_size)


def _uneven_layer(config: Any, block: Any) -> int:
    """A layer of Megatron-Core's heterogeneous blocks, whose parts may be absent."""
    size = 0
    if not block.attention.no_op:
        size += _attention(config, block.attention.num_query_groups) + _norm(config, config.hidden_size)
    if not block.mlp.no_op:
        size += _mlp(config, block.mlp.ffn_hidden_size) + _norm(config, config.hidden_size)
    return size


def _attention(config: Any, num_query_groups: int | None = None) -> int:
    hidden, heads = config.hidden_size, config.num_attention_heads
    sinks = heads if getattr(config, "softmax_type", "vanilla") == "learnable" else 0
    if config.multi_latent_attention:
        return _latent_attention(config) + sinks
    head_dim = config.kv_channels or hidden // heads
    groups = num_query_groups or config.num_query_groups or heads
    qkv = (heads + 2 * groups) * head_dim
    size = hidden * qkv + heads * head_dim * hidden
    if config.add_bias_linear:
        size += hidden
    if config.add_bias_linear or config.add_qkv_bias:
        size += qkv
    if config.qk_layernorm:
        size += 2 * _norm(config, head_dim)
    return size + sinks


def _latent_attention(config: Any) -> int:
    """DeepSeek-V2, arXiv:2405.04434, section 2.1."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    query_dim = heads * (config.qk_head_dim + config.qk_pos_emb_head_dim)
    if config.q_lora_rank is None:
        query = hidden * query_dim
    else:
        query = config.q_lora_rank * (hidden + query_dim)
        query += _norm(config, config.q_lora_rank) if config.qk_layernorm else 0
    latent = hidden * (config.kv_lora_rank + config.qk_pos_emb_head_dim)
    latent += _norm(config, config.kv_lora_rank) if config.qk_layernorm else 0
    key_value = config.kv_lora_rank * heads * (config.qk_head_dim + config.v_head_dim)
    return query + latent + key_value + heads * config.v_head_dim * hidden


def _mlp(config: Any, ffn: int | None = None) -> int:
    width: int = ffn or config.ffn_hidden_size or 4 * config.hidden_size
    widening = 2 if config.gated_linear_unit else 1
    size = (widening + 1) * config.hidden_size * width
    return size + (widening * width + config.hidden_size if config.add_bias_linear else 0)


def _experts(config: Any) -> int:
    experts = config.num_moe_experts
    router = config.hidden_size * experts + (experts if config.add_bias_linear else 0)
    shared = config.moe_shared_expert_intermediate_size
    size = experts * _mlp(config, config.moe_ffn_hidden_size) + router
    return size + (_mlp(config, shared) if shared else 0)


def _has_experts(config: Any) -> list[bool]:
    """Layer by layer, by Megatron-Core's ``moe_layer_freq``: every n-th, or a pattern of zeros and ones."""
    if not config.num_moe_experts:
        return [False] * config.num_layers
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return [layer % frequency == 0 for layer in range(config.num_layers)]
    return [bool(kind) for kind in frequency]


def _mixer(config: Any) -> int:
    """A Mamba 2 mixer, arXiv:2405.21060, section 7: the inner width is ``2 * hidden_size`` unless heads are counted."""
    hidden = config.hidden_size
    heads = config.mamba_num_heads or 2 * hidden // config.mamba_head_dim
    inner = heads * config.mamba_head_dim
    states = 2 * config.mamba_num_groups * config.mamba_state_dim
    convolution = (inner + states) * (4 + 1)
    per_head = 3 * heads  # decay, time step, skip connection
    return hidden * (2 * inner + states + heads) + convolution + per_head + inner + inner * hidden


def _norm(config: Any, width: int) -> int:
    return width if config.normalization == "RMSNorm" else 2 * width
