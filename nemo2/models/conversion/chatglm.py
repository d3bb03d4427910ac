# SPDX-License-Identifier: Apache-2.0
"""ChatGLM 2 and 3, imported under the names of their release, and exported as transformers' GLM.

transformers has no class for ChatGLM. Fields and tensors are those of THUDM/chatglm3-6b (config.json,
modeling_chatglm.py). transformers' GLM is the same decoder under Llama's names.
"""

from typing import Any

from nemo2.models.chatglm import ChatGLMConfig, ChatGLMModel
from nemo2.models.conversion.llama import attention, decoder, output_layer
from nemo2.models.conversion.pieces import fused_qkv, one
from nemo2.models.conversion.positions import rope_fields, rope_of
from nemo2.models.conversion.settings import Config, Field, decoder_fields, read, said, written
from nemo2.models.conversion.table import Conversion, Row, linear, norm, under

_FIELDS = [
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
]
_ONLY = {
    "model_type": "chatglm",
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "apply_residual_connection_post_layernorm": False,
    "multi_query_attention": True,
    "original_rope": True,
    "post_layer_norm": True,
    "rmsnorm": True,
    "pre_seq_len": None,
}
_FIELDS_GLM = decoder_fields(
    num_key_value_heads=2, head_dim=128, max_position_embeddings=131072, rms_norm_eps=1.5625e-07
)
_ONLY_GLM = {"model_type": "glm", "hidden_act": "silu", "attention_bias": True}


def rows(config: ChatGLMConfig) -> list[Row]:
    layer = [
        *norm("self_attention.linear_qkv.layer_norm_", one("input_layernorm.")),
        *linear("self_attention.linear_qkv.", fused_qkv("self_attention.query_key_value."), bias=True),
        *linear("self_attention.linear_proj.", one("self_attention.dense.")),
        *norm("mlp.linear_fc1.layer_norm_", one("post_attention_layernorm.")),
        *linear("mlp.linear_fc1.", one("mlp.dense_h_to_4h.")),
        *linear("mlp.linear_fc2.", one("mlp.dense_4h_to_h.")),
    ]
    return [
        Row("embedding.word_embeddings.weight", one("transformer.embedding.word_embeddings.weight")),
        *under("decoder.layers.*.", "transformer.encoder.layers.*.", layer),
        Row("decoder.final_layernorm.weight", one("transformer.encoder.final_layernorm.weight")),
        *output_layer(config, "transformer.output_layer.weight"),
    ]


def rows_glm(config: ChatGLMConfig) -> list[Row]:
    layer = [
        *attention(config),
        *norm("mlp.linear_fc1.layer_norm_", one("post_attention_layernorm.")),
        *linear("mlp.linear_fc1.", one("mlp.gate_up_proj.")),
        *linear("mlp.linear_fc2.", one("mlp.down_proj.")),
    ]
    return decoder(config, layer)


def config(hf: Config) -> ChatGLMConfig:
    """nemo2's configuration of a released ChatGLM. Models for longer sequences multiply the rotary base by ``rope_ratio``."""
    return ChatGLMConfig(**read(hf, _FIELDS, only=_ONLY), rotary_base=int(10_000 * hf.get("rope_ratio", 1)))


def hf_config(ours: ChatGLMConfig) -> dict[str, Any]:
    ratio = ours.rotary_base / 10_000
    return said(ours, {**written(ours, _FIELDS, only=_ONLY), "rope_ratio": ratio}, config)


def config_glm(hf: Config) -> ChatGLMConfig:
    rope = rope_of(hf, partial=0.5)
    fields = read(hf, _FIELDS_GLM, only=_ONLY_GLM)
    return ChatGLMConfig(**fields, rotary_base=rope.theta, rotary_percent=rope.partial)


def hf_config_glm(ours: ChatGLMConfig) -> dict[str, Any]:
    rope = rope_fields(ours.rotary_base, partial=ours.rotary_percent)
    return said(ours, {**written(ours, _FIELDS_GLM, only=_ONLY_GLM), **rope}, config_glm)


GLM = Conversion(
    architectures=("GlmForCausalLM",),
    model=ChatGLMModel,
    configs=(ChatGLMConfig,),
    rows=rows_glm,
    config=config_glm,
    hf_config=hf_config_glm,
)

CHATGLM = Conversion(
    architectures=("ChatGLMModel", "ChatGLMForConditionalGeneration"),
    model=ChatGLMModel,
    configs=(ChatGLMConfig,),
    rows=rows,
    config=config,
    hf_config=hf_config,
    ignored=("transformer.rotary_pos_emb.inv_freq",),
)
