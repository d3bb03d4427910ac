# SPDX-License-Identifier: Apache-2.0
"""The conversion of ChatGLM 2 and 3, 6B."""

from nemo2.models.chatglm import ChatGLMConfig, ChatGLMModel
from nemo2.models.conversion.decoder import attention, decoder, decoder_conversion, feed_forward, output_layer
from nemo2.models.conversion.pieces import fused_qkv, one
from nemo2.models.conversion.settings import Field, decoder_fields
from nemo2.models.conversion.table import Row, linear, norm, under


def _rows(config: ChatGLMConfig) -> list[Row]:
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
    rows=_rows,
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
