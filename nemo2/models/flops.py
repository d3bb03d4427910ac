# SPDX-License-Identifier: Apache-2.0
"""How many floating-point operations training a model needs, counted from its config.

Counted are the matrix products of the forward pass and the two of the backward pass (gradient of the input, gradient of
the weight), a multiply-add as two operations. Not counted: embedding look-up, norms, activations, router, softmax, the
width-four convolution of Mamba's mixers, and anything computed twice because of recomputation: these are *model* FLOPs,
the numerator of MFU.

Attention scores come in two conventions that differ by up to a third at long sequences, so every figure must say which:
``causal=True`` counts the lower triangle that a causal model needs (Megatron-LM's ``num_floating_point_operations`` and
our logs), ``causal=False`` the whole square (PaLM, arXiv:2204.02311, appendix B; NeMo 2.0's ``flops_formulas.py``). Both
count a layer with a sliding window as if it saw everything, as those formulas do.
"""

from typing import Any

from nemo2.errors import ConfigError

# Forward, gradient of the input, gradient of the weight; two operations per multiply-add.
_TRAINING = 3 * 2


def model_flops_per_token(config: Any, seq_length: int, *, vocab_size: int | None = None, causal: bool = True) -> float:
    """Training FLOPs per token of a sample of ``seq_length`` tokens.

    ``config`` is a built ``GPTConfig`` (or a config tree of one: only attributes are read, and those of heterogeneous
    layers are there once it is built), of a hybrid or a heterogeneous model too. ``vocab_size`` counts the output layer;
    None takes ``config.vocab_size``, and where that is None too the output layer is left out.

    Raises:
        ConfigError: a hybrid pattern has a letter for which there is no formula here.
    """
    rows = vocab_size or _get(config, "vocab_size", None) or 0
    depth = _get(config, "mtp_num_layers", None) or 0
    products = _layer_products(config, seq_length, causal, depth)
    # A multi-token-prediction depth joins two hidden states into one and predicts once more.
    products += depth * 2 * config.hidden_size**2 + (1 + depth) * config.hidden_size * rows
    return float(_TRAINING * products)


def model_flops_per_step(
    config: Any, seq_length: int, global_batch_size: int, *, vocab_size: int | None = None, causal: bool = True
) -> float:
    """Training FLOPs of one optimizer step, over all devices."""
    per_token = model_flops_per_token(config, seq_length, vocab_size=vocab_size, causal=causal)
    return per_token * seq_length * global_batch_size


def _layer_products(config: Any, seq_length: int, causal: bool, depth: int) -> float:
    """Multiply-adds per token of all layers, those of ``depth`` further predictions included."""
    if hasattr(config, "hybrid_override_pattern"):
        return sum(_hybrid_layer_products(config, kind, seq_length, causal) for kind in hybrid_pattern(config))
    if _get(config, "heterogeneous_block_specs", False):
        return sum(_block_products(config, block, seq_length, causal) for block in config.per_block_parameters)
    kinds = is_moe_per_layer(config)
    kinds += kinds[-1:] * depth
    attention = len(kinds) * _attention_products(config, seq_length, causal)
    return attention + sum(_mlp_products(config, is_moe) for is_moe in kinds)


def _hybrid_layer_products(config: Any, kind: str, seq_length: int, causal: bool) -> float:
    """A layer of a hybrid does one thing: ``M`` a Mamba 2 mixer, ``*`` attention, ``-`` feed-forward, ``E`` experts."""
    if kind == "M":
        return mixer_products(config)
    if kind == "*":
        return _attention_products(config, seq_length, causal)
    if kind in "-E":
        return _mlp_products(config, kind == "E")
    raise ConfigError(
        f"model.config.hybrid_override_pattern has a layer {kind!r}; its FLOPs are known for M, *, - and E."
    )


def mixer_products(config: Any) -> float:
    """Multiply-adds per token of one Mamba 2 mixer: two projections and the recurrence.

    Dao and Gu 2024, arXiv:2405.21060: section 7 for the projections (``z x B C dt`` in one, and the output's), equation 1
    for the recurrence. Per head of P channels and N states, ``B x`` adds to the state and ``C h`` reads it: N P each.
    The chunked algorithm that kernels use does more, and that is not counted.
    """
    hidden, states = config.hidden_size, config.mamba_state_dim
    heads = _get(config, "mamba_num_heads", None) or 2 * hidden // config.mamba_head_dim
    inner = heads * config.mamba_head_dim
    projections = hidden * (2 * inner + 2 * config.mamba_num_groups * states + heads) + inner * hidden
    return projections + 2 * inner * states


def hybrid_pattern(config: Any) -> str:
    """A letter per layer; where only shares are given, as many of each as Megatron-Core's ``allocate_layers`` takes."""
    pattern = config.hybrid_override_pattern
    if pattern is not None:
        return pattern.replace("|", "")  # cuts between pipeline stages, in newer versions
    attention = round(config.num_layers * _get(config, "hybrid_attention_ratio", 0.0))
    mlp = round(config.num_layers * _get(config, "hybrid_mlp_ratio", 0.0))
    return "*" * attention + "-" * mlp + "M" * (config.num_layers - attention - mlp)


def _block_products(config: Any, block: Any, seq_length: int, causal: bool) -> float:
    """A layer of Megatron-Core's heterogeneous blocks, whose parts may be missing or a single matrix."""
    linear = config.hidden_size**2
    products = 0.0
    if block.attention.replace_with_linear:
        products += linear
    elif not block.attention.no_op:
        products += _attention_products(config, seq_length, causal, groups=block.attention.num_query_groups)
    if block.mlp.replace_with_linear:
        products += linear
    elif not block.mlp.no_op:
        products += _mlp_products(config, False, ffn=block.mlp.ffn_hidden_size)
    return products


def _attention_products(config: Any, seq_length: int, causal: bool, *, groups: int | None = None) -> float:
    """Multiply-adds per token of one attention layer; ``groups`` None takes the config's."""
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
    shared: int = groups or _get(config, "num_query_groups", None) or heads
    head_dim = _get(config, "kv_channels", None) or hidden // heads
    projections = hidden * head_dim * (heads + 2 * shared) + heads * head_dim * hidden
    return projections + keys_per_query * heads * head_dim * 2


def _mlp_products(config: Any, is_moe: bool, *, ffn: int | None = None) -> float:
    """Multiply-adds per token of one feed-forward layer: the experts a token visits, and the shared one.

    ``ffn`` None takes the config's width.
    """
    matrices = 3 if _get(config, "gated_linear_unit", False) else 2
    width: int = ffn or _get(config, "ffn_hidden_size", None) or 4 * config.hidden_size
    if is_moe:
        expert = _get(config, "moe_ffn_hidden_size", None) or width
        shared = _get(config, "moe_shared_expert_intermediate_size", None) or 0
        width = expert * _get(config, "moe_router_topk", 2) + shared
    return matrices * config.hidden_size * width


def is_moe_per_layer(config: Any) -> list[bool]:
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
