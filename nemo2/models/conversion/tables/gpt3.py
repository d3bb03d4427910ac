# SPDX-License-Identifier: Apache-2.0
"""The conversion of GPT-3 and the sizes that NVIDIA measured beside it."""

from typing import Any

from nemo2.models.conversion.decoder import decoder_conversion, output_layer
from nemo2.models.conversion.pieces import Operation, fused_qkv, one
from nemo2.models.conversion.positions import UNROTATED
from nemo2.models.conversion.settings import Config, Field, Translation, refusal
from nemo2.models.conversion.table import Row, norm, under
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


def _rows(config: GPTConfig126M) -> list[Row]:
    """GPT-2's linear layers are stored [in, out]."""
    qkv = fused_qkv("attn.c_attn.weight", transposed=True), fused_qkv("attn.c_attn.bias")
    return conv_rows(config, *qkv, transposed=True)


WITHOUT_PREFIX = tuple((name, f"transformer.{name}") for name in ("wte.", "wpe.", "h.", "ln_f."))
"""The names in files that were saved from the model without its output layer, as those of GPT-2 on the hub."""


def conv_rows(config: GPTConfig, qkv: Operation, qkv_bias: Operation, *, transposed: bool) -> list[Row]:
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
        *(biases if config.add_bias_linear else []),
    ]
    return [
        Row("embedding.word_embeddings.weight", one("transformer.wte.weight")),
        Row("embedding.position_embeddings.weight", one("transformer.wpe.weight")),
        *under("decoder.layers.*.", "transformer.h.*.", layer),
        *norm("decoder.final_layernorm.", one("transformer.ln_f."), bias=True),
        *output_layer(config, "lm_head.weight"),
    ]


_GELU = {"gelu": False, "gelu_new": True, "gelu_pytorch_tanh": True}


def gelu(approximation: str) -> Translation:
    """The activation, by default ``approximation``: the family's name for the tanh approximation, which has two names in
    config.json. Megatron-Core's GELU that is fused with the bias is this one."""

    def ours(hf: Config) -> dict[str, Any]:
        activation = hf.get("activation_function", approximation)
        if activation not in _GELU:
            raise refusal(hf, "activation_function", f"nemo2's model supports {', '.join(map(repr, _GELU))}")
        return {"bias_activation_fusion": _GELU[activation]}

    def theirs(own: GPTConfig) -> dict[str, Any]:
        activation = approximation if own.bias_activation_fusion else "gelu"
        return {"activation_function": activation, "embd_pdrop": own.hidden_dropout}

    return Translation(ours, theirs)


GPT2 = decoder_conversion(
    "GPT2LMHeadModel",
    GPTModel,
    GPTConfig126M,
    rows=_rows,
    fields=conv_fields(),
    only={
        "model_type": "gpt2",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    },
    translations=[gelu("gelu_new")],
    rotary=UNROTATED,
    biased=("add_bias_linear",),
    ignored=("*.attn.bias", "*.attn.masked_bias"),
    renamed=WITHOUT_PREFIX,
)
