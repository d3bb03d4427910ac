# SPDX-License-Identifier: Apache-2.0
"""The shapes of the tensors that Megatron-Core builds from a configuration, by the ends of their keys in a checkpoint.

A conversion knows the shapes without building a model, and before it reads or writes a byte. A test compares them with
the tensors that Megatron-Core builds.
"""

from typing import Any

from nemo2.models.conversion.pieces import Shape


def shapes(config: Any, *, vocab_rows: int) -> dict[str, Shape]:
    """The shapes by key. The keys of a layer don't include its number, and the shapes of experts are those of one expert.
    ``config`` is the layer's configuration."""
    hidden = config.hidden_size
    return {
        "embedding.word_embeddings.weight": (vocab_rows, hidden),
        "output_layer.weight": (vocab_rows, hidden),
        "embedding.position_embeddings.weight": (getattr(config, "seq_length", 0), hidden),
        "final_layernorm.weight": (hidden,),
        "final_norm.weight": (hidden,),
        "input_layernorm.weight": (hidden,),
        "pre_mlp_layernorm.weight": (hidden,),
        "post_layernorm.weight": (hidden,),
        "enorm.weight": (hidden,),
        "hnorm.weight": (hidden,),
        "eh_proj.weight": (hidden, 2 * hidden),
        **(_latent_attention(config) if config.multi_latent_attention else _attention(config)),
        **_feed_forward(config),
        **(_mamba(config) if getattr(config, "mamba_num_groups", None) else {}),
        **(_delta_net(config) if getattr(config, "linear_attention_freq", None) else {}),
    }


def _attention(config: Any) -> dict[str, Shape]:
    hidden, heads, width = config.hidden_size, config.num_attention_heads, config.kv_channels or 0
    groups = config.num_query_groups or heads
    over_heads = getattr(config, "qk_layernorm_over_heads", False)
    gated = 2 if config.attention_output_gate else 1
    return {
        "self_attention.linear_qkv.weight": ((gated * heads + 2 * groups) * width, hidden),
        "self_attention.linear_qkv.layer_norm_weight": (hidden,),
        "self_attention.linear_proj.weight": (hidden, heads * width),
        "self_attention.q_layernorm.weight": (heads * width if over_heads else width,),
        "self_attention.k_layernorm.weight": (groups * width if over_heads else width,),
        "self_attention.core_attention.softmax_offset": (heads,),
        "self_attention.weight": (hidden, hidden),  # a linear layer in attention's place
    }


def _latent_attention(config: Any) -> dict[str, Shape]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    query, value = config.qk_head_dim + config.qk_pos_emb_head_dim, config.v_head_dim
    return {
        "self_attention.linear_q_proj.weight": (heads * query, hidden),
        "self_attention.linear_q_down_proj.weight": (config.q_lora_rank or 0, hidden),
        "self_attention.linear_q_up_proj.weight": (heads * query, config.q_lora_rank or 0),
        "self_attention.linear_q_up_proj.layer_norm_weight": (config.q_lora_rank or 0,),
        "self_attention.q_layernorm.weight": (config.q_lora_rank or 0,),
        "self_attention.linear_kv_down_proj.weight": (config.kv_lora_rank + config.qk_pos_emb_head_dim, hidden),
        "self_attention.linear_kv_up_proj.weight": (heads * (config.qk_head_dim + value), config.kv_lora_rank),
        "self_attention.linear_kv_up_proj.layer_norm_weight": (config.kv_lora_rank,),
        "self_attention.kv_layernorm.weight": (config.kv_lora_rank,),
        "self_attention.linear_proj.weight": (hidden, heads * value),
    }


def _feed_forward(config: Any) -> dict[str, Shape]:
    hidden, gates = config.hidden_size, 2 if config.gated_linear_unit else 1
    experts = config.num_moe_experts or 0
    each = config.moe_ffn_hidden_size or config.ffn_hidden_size
    shared = config.moe_shared_expert_intermediate_size or 0
    return {
        "mlp.linear_fc1.weight": (gates * config.ffn_hidden_size, hidden),
        "mlp.linear_fc1.layer_norm_weight": (hidden,),
        "mlp.linear_fc2.weight": (hidden, config.ffn_hidden_size),
        "mlp.weight": (hidden, hidden),  # a linear layer in its place
        "mlp.router.weight": (experts, hidden),
        "mlp.router.bias": (experts,),
        "mlp.router.expert_bias": (experts,),
        "mlp.experts.experts.linear_fc1.weight": (gates * each, hidden),
        "mlp.experts.experts.linear_fc2.weight": (hidden, each),
        "mlp.shared_experts.linear_fc1.weight": (gates * shared, hidden),
        "mlp.shared_experts.linear_fc2.weight": (hidden, shared),
        "mlp.shared_experts.gate_weight": (1, hidden),
    }


def _mamba(config: Any) -> dict[str, Shape]:
    hidden, width = config.hidden_size, config.mamba_head_dim
    heads = config.mamba_num_heads or 2 * hidden // width
    inner, states, taps = heads * width, config.mamba_num_groups * config.mamba_state_dim, 4
    parts = {"z": inner, "x": inner, "B": states, "C": states, "dt": heads}
    convolved = {name: parts[name] for name in ("x", "B", "C")}
    return {
        "mixer.A_log": (heads,),
        "mixer.dt_bias": (heads,),
        "mixer.D": (heads,),
        "mixer.norm.weight": (inner,),
        "mixer.in_proj.layer_norm_weight": (hidden,),
        "mixer.out_proj.weight": (hidden, inner),
        **{f"mixer.in_proj.weight.{name}": (size, hidden) for name, size in parts.items()},
        **{f"mixer.conv1d.weight.{name}": (size, 1, taps) for name, size in convolved.items()},
        **{f"mixer.conv1d.bias.{name}": (size,) for name, size in convolved.items()},
    }


def _delta_net(config: Any) -> dict[str, Shape]:
    hidden, heads = config.hidden_size, config.linear_num_value_heads
    keys, values = config.linear_num_key_heads * config.linear_key_head_dim, heads * config.linear_value_head_dim
    convolved = {"query": keys, "key": keys, "value": values}
    parts = {**convolved, "z": values, "beta": heads, "alpha": heads}
    return {
        "self_attention.A_log": (heads,),
        "self_attention.dt_bias": (heads,),
        "self_attention.out_norm.weight": (config.linear_value_head_dim,),
        "self_attention.in_proj.layer_norm_weight": (hidden,),
        "self_attention.out_proj.weight": (hidden, values),
        **{f"self_attention.in_proj.weight.{name}": (size, hidden) for name, size in parts.items()},
        **{
            f"self_attention.conv1d.weight.{name}": (size, 1, config.linear_conv_kernel_dim)
            for name, size in convolved.items()
        },
    }


def shape_of(key: str, shapes_by_key: dict[str, Shape]) -> Shape:
    """The shape of the tensor stored under ``key``, for one layer and one expert. A bias has the rows of its weight.

    Raises:
        KeyError: the key is unknown, which is a mistake in a table.
    """
    parts = key.split(".")
    for first in range(len(parts)):
        end = ".".join(parts[first:])
        if end in shapes_by_key:
            return shapes_by_key[end]
        weight = f"{end.removesuffix('bias')}weight"
        if end.endswith("bias") and weight in shapes_by_key:
            return shapes_by_key[weight][:1]
    raise KeyError(key)
