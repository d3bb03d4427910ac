# SPDX-License-Identifier: Apache-2.0
"""ChatGLM 2 and 3, under the names of their release, and as transformers' GLM, which is what is exported.

transformers has no class for ChatGLM: fields and tensors are those of THUDM/chatglm3-6b (config.json, modeling_chatglm.py). Its
GLM is the same decoder under Llama's names.
"""

from typing import Any

from nemo2.models.chatglm import ChatGLMConfig
from nemo2.models.conversion.settings import Config, Field, decoder_fields, read, rope_fields, rope_of, said, written

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


def config(hf: Config) -> ChatGLMConfig:
    """Of a released ChatGLM; longer ones raise the rotary base by ``rope_ratio``."""
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
