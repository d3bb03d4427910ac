# SPDX-License-Identifier: Apache-2.0
"""GPT-3 and the sizes that NVIDIA measured beside it: learned positions, LayerNorm, GELU, biases.

Sources: arXiv:2005.14165, table 2.1 (126M, 175B); NeMo's ``launcher`` configurations for the rest.
"""

from dataclasses import dataclass
from typing import Any, Optional

from nemo2.config.capture import configurable
from nemo2.models.conversion.decoder import decoder_conversion, output_layer
from nemo2.models.conversion.pieces import Operation, fused_qkv, one
from nemo2.models.conversion.positions import UNROTATED
from nemo2.models.conversion.settings import Config, Field, Translation, refusal
from nemo2.models.conversion.table import Row, norm, under
from nemo2.models.gpt import GPTConfig, GPTModel


@configurable
@dataclass
class GPTConfig126M(GPTConfig):
    """0.13 B parameters with a vocabulary of 51,200."""

    seq_length: int = 2048
    num_layers: int = 12
    hidden_size: int = 768
    ffn_hidden_size: Optional[int] = 3072
    num_attention_heads: int = 12
    bias_activation_fusion: bool = True
    bias_dropout_fusion: bool = True
    use_transformer_engine_full_layer_spec: bool = True


class GPTConfig5B(GPTConfig126M, num_layers=24, hidden_size=4096, ffn_hidden_size=16384, num_attention_heads=32):
    """5.1 B parameters with a vocabulary of 51,200."""


class GPTConfig7B(GPTConfig126M, num_layers=32, hidden_size=4096, ffn_hidden_size=10880, num_attention_heads=32):
    """5.2 B parameters with a vocabulary of 51,200: the width of a gated 7B, without the gate."""


class GPTConfig20B(GPTConfig126M, num_layers=44, hidden_size=6144, ffn_hidden_size=24576, num_attention_heads=48):
    """20.3 B parameters with a vocabulary of 51,200."""


class GPTConfig40B(GPTConfig126M, num_layers=48, hidden_size=8192, ffn_hidden_size=32768, num_attention_heads=64):
    """39.1 B parameters with a vocabulary of 51,200."""


class GPTConfig175B(
    GPTConfig126M,
    num_layers=96,
    hidden_size=12288,
    ffn_hidden_size=49152,
    num_attention_heads=96,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    layernorm_zero_centered_gamma=True,
):
    """174.6 B parameters with a vocabulary of 51,200."""


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
