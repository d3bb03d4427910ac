# SPDX-License-Identifier: Apache-2.0
"""How many floating-point operations training a model needs, counted from its config.

Counted are the matrix products of the forward pass and the two of the backward pass (gradient of the input, gradient of
the weight), a multiply-add as two operations. Not counted: embedding look-up, norms, activations, router, softmax, and
anything computed twice because of recomputation: these are *model* FLOPs, the numerator of MFU.

Attention scores come in two conventions that differ by up to a third at long sequences, so every figure must say which:
``causal=True`` counts the lower triangle that a causal model needs (Megatron-LM's ``num_floating_point_operations`` and
our logs), ``causal=False`` the whole square (PaLM, arXiv:2204.02311, appendix B; NeMo 2.0's ``flops_formulas.py``).
"""

from typing import Any

# Forward, gradient of the input, gradient of the weight; two operations per multiply-add.
_TRAINING = 3 * 2


def model_flops_per_token(config: Any, seq_length: int, *, vocab_size: int | None = None, causal: bool = True) -> float:
    """Training FLOPs per token of a sample of ``seq_length`` tokens.

    ``config`` is a built ``GPTConfig`` (or a config tree of one: only attributes are read). ``vocab_size`` counts the
    output layer; None takes ``config.vocab_size``, and where that is None too the output layer is left out.
    """
    rows = vocab_size or _get(config, "vocab_size", None) or 0
    depth = _get(config, "mtp_num_layers", None) or 0
    layer_kinds = _is_moe_per_layer(config)
    layer_kinds += layer_kinds[-1:] * depth
    products = sum(_mlp_products(config, is_moe) for is_moe in layer_kinds)
    products += len(layer_kinds) * _attention_products(config, seq_length, causal)
    # A multi-token-prediction depth joins two hidden states into one and predicts once more.
    products += depth * 2 * config.hidden_size**2 + (1 + depth) * config.hidden_size * rows
    return float(_TRAINING * products)


def model_flops_per_step(
    config: Any, seq_length: int, global_batch_size: int, *, vocab_size: int | None = None, causal: bool = True
) -> float:
    """Training FLOPs of one optimizer step, over all devices."""
    per_token = model_flops_per_token(config, seq_length, vocab_size=vocab_size, causal=causal)
    return per_token * seq_length * global_batch_size


def _attention_products(config: Any, seq_length: int, causal: bool) -> float:
    """Multiply-adds per token of one attention layer."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    keys_per_query = seq_length / 2 if causal else seq_length
    if _get(config, "multi_latent_attention", False):
        # DeepSeek-V2, arXiv:2405.04434, section 2.1: low-rank queries and keys/values, rotary channels beside them.
        query_dim = config.qk_head_dim + config.qk_pos_emb_head_dim
        rank = _get(config, "q_lora_rank", None)
        query = hidden * heads * query_dim if rank is None else rank * (hidden + heads * query_dim)
        latent = config.kv_lora_rank
        key_value = hidden * (latent + config.qk_pos_emb_head_dim)
        key_value += latent * heads * (config.qk_head_dim + config.v_head_dim)
        output = heads * config.v_head_dim * hidden
        return query + key_value + output + keys_per_query * heads * (query_dim + config.v_head_dim)
    groups = _get(config, "num_query_groups", None) or heads
    head_dim = _get(config, "kv_channels", None) or hidden // heads
    projections = hidden * head_dim * (heads + 2 * groups) + heads * head_dim * hidden
    return projections + keys_per_query * heads * head_dim * 2


def _mlp_products(config: Any, is_moe: bool) -> float:
    """Multiply-adds per token of one feed-forward layer: the experts a token visits, and the shared one."""
    matrices = 3 if _get(config, "gated_linear_unit", False) else 2
    ffn = _get(config, "ffn_hidden_size", None) or 4 * config.hidden_size
    if is_moe:
        expert = _get(config, "moe_ffn_hidden_size", None) or ffn
        shared = _get(config, "moe_shared_expert_intermediate_size", None) or 0
        ffn = expert * _get(config, "moe_router_topk", 2) + shared
    return matrices * config.hidden_size * ffn


def _is_moe_per_layer(config: Any) -> list[bool]:
    """Which layers hold experts, by Megatron-Core's ``moe_layer_freq``: every n-th, or a pattern of zeros and ones."""
    layers = config.num_layers
    if not _get(config, "num_moe_experts", None):
        return [False] * layers
    frequency = _get(config, "moe_layer_freq", 1)
    if isinstance(frequency, int):
        return [layer % frequency == 0 for layer in range(layers)]
    return [bool(kind) for kind in frequency]


def _get(config: Any, name: str, default: Any) -> Any:
    return getattr(config, name, default)
