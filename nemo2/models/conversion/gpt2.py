# SPDX-License-Identifier: Apache-2.0
"""GPTs like GPT-2 and GPT-3: learned positions, LayerNorm, the tanh approximation of GELU, biases."""

from typing import Any

from nemo2.models.conversion.pieces import Operation, fused_qkv, one
from nemo2.models.conversion.settings import Config, Field, read, refusal, said, written
from nemo2.models.conversion.table import Conversion, Row, norm, under
from nemo2.models.gpt import GPTConfig, GPTModel
from nemo2.models.gpt3 import GPTConfig126M


def conv_fields() -> list[Field]:
    """The fields under GPT-2's names, which StarCoder 1 shares. In both models the output layer is tied to the embedding."""
    return [
        Field("vocab_size", "vocab_size"),
        Field("n_positions", "seq_length"),
        Field("n_embd", "hidden_size"),
        Field("n_layer", "num_layers"),
        Field("n_head", "num_attention_heads"),
        Field("n_inner", "ffn_hidden_size", None),
        Field("resid_pdrop", "hidden_dropout", 0.1),
        Field("attn_pdrop", "attention_dropout", 0.1),
        Field("layer_norm_epsilon", "layernorm_epsilon", 1e-5),
        Field("initializer_range", "init_method_std", 0.02),
    ]


_FIELDS = conv_fields()
_ONLY = {
    "model_type": "gpt2",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}


def rows(config: GPTConfig126M) -> list[Row]:
    """GPT-2's linear layers are stored [in, out]."""
    qkv = fused_qkv("attn.c_attn.weight", transposed=True), fused_qkv("attn.c_attn.bias")
    return conv_rows(*qkv, transposed=True, bias=config.add_bias_linear)


def conv_rows(qkv: Operation, qkv_bias: Operation, *, transposed: bool, bias: bool) -> list[Row]:
    """A whole model under GPT-2's names, which StarCoder 1 shares."""
    biases = [
        Row("self_attention.linear_qkv.bias", qkv_bias),
        Row("self_attention.linear_proj.bias", one("attn.c_proj.bias")),
        Row("mlp.linear_fc1.bias", one("mlp.c_fc.bias")),
        Row("mlp.linear_fc2.bias", one("mlp.c_proj.bias")),
    ]
    layer = [
        *norm("self_attention.linear_qkv.layer_norm_", one("ln_1."), bias=True),
        Row("self_attention.linear_qkv.weight", qkv),
        Row("self_attention.linear_proj.weight", one("attn.c_proj.weight", transposed=transposed)),
        *norm("mlp.linear_fc1.layer_norm_", one("ln_2."), bias=True),
        Row("mlp.linear_fc1.weight", one("mlp.c_fc.weight", transposed=transposed)),
        Row("mlp.linear_fc2.weight", one("mlp.c_proj.weight", transposed=transposed)),
        *(biases if bias else []),
    ]
    return [
        Row("embedding.word_embeddings.weight", one("wte.weight")),
        Row("embedding.position_embeddings.weight", one("wpe.weight")),
        *under("decoder.layers.*.", "h.*.", layer),
        *norm("decoder.final_layernorm.", one("ln_f."), bias=True),
    ]


def config(hf: Config) -> GPTConfig126M:
    return GPTConfig126M(**read(hf, _FIELDS, only=_ONLY), **gelu_of(hf, default="gelu_new"))


def hf_config(ours: GPTConfig126M) -> dict[str, Any]:
    told = {"activation_function": gelu_in(ours, "gelu_new"), "embd_pdrop": ours.hidden_dropout}
    return said(ours, {**written(ours, _FIELDS, only=_ONLY), **told}, config)


_GELU = {"gelu": False, "gelu_new": True, "gelu_pytorch_tanh": True}


def gelu_of(hf: Config, *, default: str) -> dict[str, Any]:
    """nemo2's settings for ``activation_function``. Megatron-Core's GELU that is fused with the bias is the tanh
    approximation, which has two names in config.json."""
    activation = hf.get("activation_function", default)
    if activation not in _GELU:
        raise refusal(hf, "activation_function", f"nemo2's model supports {', '.join(map(repr, _GELU))}")
    return {"bias_activation_fusion": _GELU[activation]}


def gelu_in(ours: GPTConfig, approximation: str) -> str:
    """The inverse of `gelu_of`. ``approximation`` is the family's name for the tanh approximation."""
    return approximation if ours.bias_activation_fusion else "gelu"


GPT2 = Conversion(
    architectures=("GPT2LMHeadModel",),
    model=GPTModel,
    configs=(GPTConfig126M,),
    rows=rows,
    config=config,
    hf_config=hf_config,
    biased=("add_bias_linear",),
    ignored=("*.attn.bias", "*.attn.masked_bias"),
    prefixes=("transformer.", ""),
)
