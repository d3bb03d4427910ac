# SPDX-License-Identifier: Apache-2.0
"""The conversions of ChatGLM 2 and 3 (6B), GLM, GLM-4.5 and 4.6."""

from typing import Any

from nemo2.models.chatglm import ChatGLMConfig, ChatGLMModel
from nemo2.models.conversion.decoder import attention, decoder, decoder_conversion, feed_forward, output_layer
from nemo2.models.conversion.experts import (
    FURTHER_PREDICTIONS,
    REPEATED,
    beside_experts,
    check_routing,
    dense_then_experts,
    further_predictions,
    rows_with_experts,
)
from nemo2.models.conversion.pieces import fused_qkv, one
from nemo2.models.conversion.settings import Config, Field, Translation, decoder_fields, expert_fields
from nemo2.models.conversion.table import Row, linear, norm, under
from nemo2.models.glm4_moe import GLM4MoEConfig, GLM4MoEModel


def _chatglm_rows(config: ChatGLMConfig) -> list[Row]:
    layer = [
        *norm("self_attention.linear_qkv.layer_norm_", one("input_layernorm.")),
        *linear("self_attention.linear_qkv.", fused_qkv("self_attention.query_key_value."), bias=True),
        *linear("self_attention.linear_proj.", one("self_attention.dense.")),
        *feed_forward(one("mlp.dense_h_to_4h."), "mlp.dense_4h_to_h."),
    ]
    return [
        Row("embedding.word_embeddings.weight", one("transformer.embedding.word_embeddings.weight")),
        *under("decoder.layers.*.", "transformer.encoder.layers.*.", layer),
        Row("decoder.final_layernorm.weight", one("transformer.encoder.final_layernorm.weight")),
        *output_layer(config, "transformer.output_layer.weight"),
    ]


def _rows_glm(config: ChatGLMConfig) -> list[Row]:
    return decoder(config, [*attention(config), *feed_forward(one("mlp.gate_up_proj."), "mlp.down_proj.")])


GLM = decoder_conversion(
    "GlmForCausalLM",
    ChatGLMModel,
    ChatGLMConfig,
    rows=_rows_glm,
    fields=decoder_fields(num_key_value_heads=2, head_dim=128, max_position_embeddings=131072, rms_norm_eps=1.5625e-07),
    only={"model_type": "glm", "hidden_act": "silu", "attention_bias": True},
    partial=0.5,
)

CHATGLM = decoder_conversion(
    "ChatGLMModel",
    ChatGLMModel,
    ChatGLMConfig,
    rows=_chatglm_rows,
    fields=[
        Field("padded_vocab_size", "vocab_size"),
        Field("num_layers", "num_layers"),
        Field("hidden_size", "hidden_size"),
        Field("ffn_hidden_size", "ffn_hidden_size"),
        Field("num_attention_heads", "num_attention_heads"),
        Field("multi_query_group_num", "num_query_groups", 2),
        Field("kv_channels", "kv_channels", 128),
        Field("seq_length", "seq_length", 2048),
        Field("layernorm_epsilon", "layernorm_epsilon", 1e-5),
        Field("hidden_dropout", "hidden_dropout", 0.0),
        Field("attention_dropout", "attention_dropout", 0.0),
        Field("tie_word_embeddings", "share_embeddings_and_output_weights", False),
    ],
    only={
        "model_type": "chatglm",
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "apply_residual_connection_post_layernorm": False,
        "multi_query_attention": True,
        "original_rope": True,
        "post_layer_norm": True,
        "rmsnorm": True,
        "pre_seq_len": None,
    },
    rotary=(
        # Models for longer sequences multiply the rotary base.
        lambda hf, settings: {"rotary_base": int(10_000 * hf.get("rope_ratio", 1))},
        lambda own: {"rope_ratio": own.rotary_base / 10_000},
    ),
    also=("ChatGLMForConditionalGeneration",),
    ignored=("transformer.rotary_pos_emb.inv_freq",),
)


def _glm4_moe_rows(config: GLM4MoEConfig) -> list[Row]:
    return rows_with_experts(config, beside_experts(config)) + further_predictions(config, attention(config))


_GROUPS = {"n_group": "moe_router_num_groups", "topk_group": "moe_router_group_topk"}


def _groups(hf: Config) -> dict[str, Any]:
    groups = {ours: hf.get(theirs, 1) for theirs, ours in _GROUPS.items()}
    check_routing(hf, {"moe_router_topk": hf.get("num_experts_per_tok", 8), **groups})
    return groups


GLM4_MOE = decoder_conversion(
    "Glm4MoeForCausalLM",
    GLM4MoEModel,
    GLM4MoEConfig,
    rows=_glm4_moe_rows,
    fields=[
        *decoder_fields(num_key_value_heads=8, rms_norm_eps=1e-5, max_position_embeddings=131072),
        Field("attention_bias", "add_qkv_bias", False),
        Field("use_qk_norm", "qk_layernorm", False),
        *expert_fields(
            n_routed_experts=128, num_experts_per_tok=8, moe_intermediate_size=1408, routed_scaling_factor=1.0
        ),
    ],
    only={"model_type": "glm4_moe", "hidden_act": "silu", "norm_topk_prob": True},
    translations=[
        Translation(_groups, lambda ours: {theirs: getattr(ours, name) or 1 for theirs, name in _GROUPS.items()}),
        dense_then_experts(1408, default=1),
        FURTHER_PREDICTIONS,
    ],
    partial=0.5,
    ignored=REPEATED,
)
