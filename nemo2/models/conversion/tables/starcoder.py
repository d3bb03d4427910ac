# SPDX-License-Identifier: Apache-2.0
"""The conversions of StarCoder and StarCoder 2."""

from typing import Any

from nemo2.models.conversion.decoder import attention, decoder, decoder_conversion, feed_forward
from nemo2.models.conversion.pieces import fused_qkv, one
from nemo2.models.conversion.positions import UNROTATED, rope_fields, rope_of
from nemo2.models.conversion.settings import (
    DERIVED,
    Config,
    Field,
    Translation,
    decoder_fields,
    refusal,
    uniform_window,
    without,
)
from nemo2.models.conversion.table import Row
from nemo2.models.conversion.tables.gpt3 import WITHOUT_PREFIX, conv_fields, conv_rows, gelu
from nemo2.models.starcoder import StarcoderConfig, StarcoderModel
from nemo2.models.starcoder2 import Starcoder2Config, Starcoder2Model


def _starcoder_rows(config: StarcoderConfig) -> list[Row]:
    """One key and value for all queries. If each head has its own, they are ordered as in Megatron-Core."""
    qkv = fused_qkv if config.num_query_groups == 1 else one
    both = qkv("attn.c_attn.weight"), qkv("attn.c_attn.bias")
    return conv_rows(config, *both, transposed=False)


STARCODER = decoder_conversion(
    "GPTBigCodeForCausalLM",
    StarcoderModel,
    StarcoderConfig,
    rows=_starcoder_rows,
    fields=conv_fields(),
    only={"model_type": "gpt_bigcode", "scale_attn_weights": True, "tie_word_embeddings": True},
    translations=[
        gelu("gelu_pytorch_tanh"),
        Translation(
            lambda hf: {"num_query_groups": 1 if hf.get("multi_query", True) else hf["n_head"]},
            lambda own: {"multi_query": own.num_query_groups == 1},
        ),
    ],
    rotary=UNROTATED,
    biased=("add_bias_linear",),
    ignored=("*.attn.bias", "*.attn.masked_bias"),
    renamed=WITHOUT_PREFIX,
)


def _starcoder2_rows(config: Starcoder2Config) -> list[Row]:
    layer = [
        *attention(config, norm_bias=True),
        *feed_forward(one("mlp.c_fc."), "mlp.c_proj.", bias=True, norm_bias=True),
    ]
    return decoder(config, layer, norm_bias=True)


def _check_dropout(hf: Config) -> dict[str, Any]:
    dropout = hf.get("residual_dropout", 0.0)
    if hf.get("embedding_dropout", 0.0) != dropout:
        raise refusal(hf, "embedding_dropout", f"nemo2's model needs residual_dropout's value, {dropout}")
    return {}


STARCODER2 = decoder_conversion(
    "Starcoder2ForCausalLM",
    Starcoder2Model,
    Starcoder2Config,
    rows=_starcoder2_rows,
    fields=[
        *without(
            decoder_fields(
                head_dim=DERIVED,
                num_key_value_heads=2,
                max_position_embeddings=4096,
                initializer_range=0.018042,
                tie_word_embeddings=True,
            ),
            "rms_norm_eps",
        ),
        Field("norm_epsilon", "layernorm_epsilon", 1e-5),
        Field("residual_dropout", "hidden_dropout", 0.0),
    ],
    only={"model_type": "starcoder2", "hidden_act": "gelu_pytorch_tanh", "use_bias": True},
    translations=[
        uniform_window(),
        Translation(_check_dropout, lambda own: {"embedding_dropout": own.hidden_dropout}),
    ],
    rotary=(lambda hf, _: {"rotary_base": rope_of(hf).theta}, lambda ours: rope_fields(ours.rotary_base)),
)
