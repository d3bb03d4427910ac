# SPDX-License-Identifier: Apache-2.0
"""StarCoder 1 (GPTBigCode) and 2."""

from typing import Any

from nemo2.models.conversion.gpt2 import conv_fields, conv_rows, gelu_in, gelu_of
from nemo2.models.conversion.llama import attention, decoder
from nemo2.models.conversion.pieces import fused_qkv, one
from nemo2.models.conversion.positions import rope_fields, rope_of
from nemo2.models.conversion.settings import (
    Config,
    Field,
    decoder_fields,
    read,
    refusal,
    said,
    size_of,
    window_of,
    without,
    written,
)
from nemo2.models.conversion.table import Conversion, Row, linear, norm
from nemo2.models.starcoder import Starcoder2Config, Starcoder2Model, StarcoderConfig, StarcoderModel

_FIELDS_1 = conv_fields()
_ONLY_1 = {
    "model_type": "gpt_bigcode",
    "scale_attn_weights": True,
    "tie_word_embeddings": True,
}
_FIELDS_2 = [
    *without(
        decoder_fields(
            num_key_value_heads=2, max_position_embeddings=4096, initializer_range=0.018042, tie_word_embeddings=True
        ),
        "rms_norm_eps",
        "head_dim",
    ),
    Field("norm_epsilon", "layernorm_epsilon", 1e-5),
    Field("residual_dropout", "hidden_dropout", 0.0),
]
_ONLY_2 = {"model_type": "starcoder2", "hidden_act": "gelu_pytorch_tanh", "use_bias": True}


def rows_1(config: StarcoderConfig) -> list[Row]:
    """One key and value for all queries. If each head has its own, they are ordered as in Megatron-Core."""
    qkv = fused_qkv if config.num_query_groups == 1 else one
    both = qkv("attn.c_attn.weight"), qkv("attn.c_attn.bias")
    return conv_rows(*both, transposed=False, bias=config.add_bias_linear)


def rows_2(config: Starcoder2Config) -> list[Row]:
    layer = [
        *attention(config, norm_bias=True),
        *norm("mlp.linear_fc1.layer_norm_", one("post_attention_layernorm."), bias=True),
        *linear("mlp.linear_fc1.", one("mlp.c_fc."), bias=True),
        *linear("mlp.linear_fc2.", one("mlp.c_proj."), bias=True),
    ]
    return decoder(config, layer, norm_bias=True)


def config_1(hf: Config) -> StarcoderConfig:
    fields = read(hf, _FIELDS_1, only=_ONLY_1)
    groups = 1 if hf.get("multi_query", True) else fields["num_attention_heads"]
    return StarcoderConfig(**fields, **gelu_of(hf, default="gelu_pytorch_tanh"), num_query_groups=groups)


def hf_config_1(ours: StarcoderConfig) -> dict[str, Any]:
    hf = {
        **written(ours, _FIELDS_1, only=_ONLY_1),
        "activation_function": gelu_in(ours, "gelu_pytorch_tanh"),
        "embd_pdrop": ours.hidden_dropout,
        "multi_query": ours.num_query_groups == 1,
    }
    return said(ours, hf, config_1)


def config_2(hf: Config) -> Starcoder2Config:
    fields = read(hf, _FIELDS_2, only=_ONLY_2)
    if hf.get("embedding_dropout", 0.0) != fields["hidden_dropout"]:
        raise refusal(
            hf, "embedding_dropout", f"nemo2's model needs residual_dropout's value, {fields['hidden_dropout']}"
        )
    window = window_of(hf.get("sliding_window"))
    communication = None if window is None else "a2a"
    return Starcoder2Config(**fields, rotary_base=rope_of(hf).theta, window_size=window, cp_comm_type=communication)


def hf_config_2(ours: Starcoder2Config) -> dict[str, Any]:
    hf = {
        **written(ours, _FIELDS_2, only=_ONLY_2),
        "num_key_value_heads": ours.num_query_groups or ours.num_attention_heads,
        "embedding_dropout": ours.hidden_dropout,
        "sliding_window": size_of(ours.window_size),
        **rope_fields(ours.rotary_base),
    }
    return said(ours, hf, config_2)


STARCODER = Conversion(
    architectures=("GPTBigCodeForCausalLM",),
    model=StarcoderModel,
    configs=(StarcoderConfig,),
    rows=rows_1,
    config=config_1,
    hf_config=hf_config_1,
    biased=("add_bias_linear",),
    ignored=("*.attn.bias", "*.attn.masked_bias"),
    prefixes=("transformer.", ""),
)

STARCODER2 = Conversion(
    architectures=("Starcoder2ForCausalLM",),
    model=Starcoder2Model,
    configs=(Starcoder2Config,),
    rows=rows_2,
    config=config_2,
    hf_config=hf_config_2,
)
