# SPDX-License-Identifier: Apache-2.0
"""Llama 2, 3, 3.1 and 3.2, Code Llama."""

from collections.abc import Mapping
from typing import Any

from nemo2.models.conversion.pieces import cat, one, qkv
from nemo2.models.conversion.table import Conversion, Row, linear, norm, under
from nemo2.models.gpt import GPTConfig
from nemo2.models.llama import LlamaConfig, LlamaModel


def rows(config: LlamaConfig) -> list[Row]:
    bias = config.add_bias_linear
    table = [
        Row("embedding.word_embeddings.weight", one("model.embed_tokens.weight")),
        *under("decoder.layers.*.", "model.layers.*.", [*attention(config), *gated_feed_forward(bias=bias)]),
        Row("decoder.final_layernorm.weight", one("model.norm.weight")),
    ]
    if not config.share_embeddings_and_output_weights:
        table.append(Row("output_layer.weight", one("lm_head.weight")))
    return table


def attention(config: GPTConfig) -> list[Row]:
    """A layer's norm and attention, by the names that most families have taken over."""
    projections = qkv("self_attn.q_proj.", "self_attn.k_proj.", "self_attn.v_proj.")
    return [
        *norm("self_attention.linear_qkv.layer_norm_", one("input_layernorm.")),
        *linear("self_attention.linear_qkv.", projections, bias=config.add_bias_linear or config.add_qkv_bias),
        *linear("self_attention.linear_proj.", one("self_attn.o_proj."), bias=config.add_bias_linear),
    ]


def gated_feed_forward(*, bias: bool = False) -> list[Row]:
    """Likewise of the norm and the feed-forward."""
    return [
        *norm("mlp.linear_fc1.layer_norm_", one("post_attention_layernorm.")),
        *linear("mlp.linear_fc1.", cat("mlp.gate_proj.", "mlp.up_proj."), bias=bias),
        *linear("mlp.linear_fc2.", one("mlp.down_proj."), bias=bias),
    ]


def config(released: Mapping[str, Any]) -> LlamaConfig:
    heads, hidden = released["num_attention_heads"], released["hidden_size"]
    return LlamaConfig(
        num_layers=released["num_hidden_layers"],
        hidden_size=hidden,
        ffn_hidden_size=released["intermediate_size"],
        num_attention_heads=heads,
        num_query_groups=released.get("num_key_value_heads") or heads,
        kv_channels=released.get("head_dim") or hidden // heads,
        vocab_size=released["vocab_size"],
        rotary_base=int(released.get("rope_theta", 10_000)),
        layernorm_epsilon=released.get("rms_norm_eps", 1e-6),
        share_embeddings_and_output_weights=released.get("tie_word_embeddings", False),
        seq_length=released.get("max_position_embeddings", 2048),
    )


def hf_config(config: LlamaConfig) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_query_groups,
        "head_dim": config.kv_channels,
        "vocab_size": config.vocab_size,
        "rope_theta": config.rotary_base,
        "rms_norm_eps": config.layernorm_epsilon,
        "tie_word_embeddings": config.share_embeddings_and_output_weights,
        "max_position_embeddings": config.seq_length,
        "hidden_act": "silu",
    }


LLAMA = Conversion(
    architectures=("LlamaForCausalLM",),
    model=LlamaModel,
    configs=(LlamaConfig,),
    rows=rows,
    config=config,
    hf_config=hf_config,
    ignored=("model.layers.*.self_attn.rotary_emb.inv_freq",),
)
