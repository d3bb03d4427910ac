# SPDX-License-Identifier: Apache-2.0
"""Mixtral, by the names in released files."""

from collections.abc import Mapping
from typing import Any

from nemo2.models.conversion.llama import attention
from nemo2.models.conversion.pieces import cat, one
from nemo2.models.conversion.table import Conversion, Row, linear, norm, under
from nemo2.models.mixtral import MixtralConfig, MixtralModel


def rows(config: MixtralConfig) -> list[Row]:
    expert = "block_sparse_moe.experts.*."
    layer = [
        *attention(config),
        *norm("mlp.linear_fc1.layer_norm_", one("post_attention_layernorm.")),
        Row("mlp.router.weight", one("block_sparse_moe.gate.weight")),
        *linear("mlp.experts.experts.linear_fc1.", cat(f"{expert}w1.", f"{expert}w3.")),
        *linear("mlp.experts.experts.linear_fc2.", one(f"{expert}w2.")),
    ]
    return [
        Row("embedding.word_embeddings.weight", one("model.embed_tokens.weight")),
        *under("decoder.layers.*.", "model.layers.*.", layer),
        Row("decoder.final_layernorm.weight", one("model.norm.weight")),
        Row("output_layer.weight", one("lm_head.weight")),
    ]


def config(released: Mapping[str, Any]) -> MixtralConfig:
    heads, hidden = released["num_attention_heads"], released["hidden_size"]
    return MixtralConfig(
        num_layers=released["num_hidden_layers"],
        hidden_size=hidden,
        ffn_hidden_size=released["intermediate_size"],
        num_attention_heads=heads,
        num_query_groups=released.get("num_key_value_heads") or heads,
        kv_channels=released.get("head_dim") or hidden // heads,
        vocab_size=released["vocab_size"],
        rotary_base=int(released.get("rope_theta", 1_000_000)),
        layernorm_epsilon=released.get("rms_norm_eps", 1e-5),
        num_moe_experts=released["num_local_experts"],
        moe_router_topk=released["num_experts_per_tok"],
        seq_length=released.get("max_position_embeddings", 4096),
    )


def hf_config(config: MixtralConfig) -> dict[str, Any]:
    return {
        "model_type": "mixtral",
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.moe_ffn_hidden_size or config.ffn_hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_query_groups,
        "head_dim": config.kv_channels,
        "vocab_size": config.vocab_size,
        "rope_theta": config.rotary_base,
        "rms_norm_eps": config.layernorm_epsilon,
        "num_local_experts": config.num_moe_experts,
        "num_experts_per_tok": config.moe_router_topk,
        "max_position_embeddings": config.seq_length,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    }


MIXTRAL = Conversion(
    architectures=("MixtralForCausalLM",),
    model=MixtralModel,
    configs=(MixtralConfig,),
    rows=rows,
    config=config,
    hf_config=hf_config,
)
