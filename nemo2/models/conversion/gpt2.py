# SPDX-License-Identifier: Apache-2.0
"""GPTs like GPT-2 and GPT-3: learned positions, LayerNorm, the tanh approximation of GELU, biases."""

from typing import Any

from nemo2.models.conversion.settings import Config, Field, read, said, written
from nemo2.models.gpt3 import GPTConfig126M


def conv_fields() -> list[Field]:
    """Fields under GPT-2's names, which StarCoder 1 has too."""
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
        Field("tie_word_embeddings", "share_embeddings_and_output_weights", True),
    ]


_FIELDS = conv_fields()
_ONLY = {
    "model_type": "gpt2",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}


def config(hf: Config) -> GPTConfig126M:
    # Two names of one approximation.
    activation = hf.get("activation_function", "gelu_new")
    told = {**hf, "activation_function": "gelu_new" if activation == "gelu_pytorch_tanh" else activation}
    fields = read(told, _FIELDS, only=_ONLY | {"activation_function": "gelu_new"})
    return GPTConfig126M(**{"ffn_hidden_size": 4 * fields["hidden_size"], **fields})


def hf_config(ours: GPTConfig126M) -> dict[str, Any]:
    told = {"activation_function": "gelu_new", "embd_pdrop": ours.hidden_dropout}
    return said(ours, {**written(ours, _FIELDS, only=_ONLY), **told}, config)
