# SPDX-License-Identifier: Apache-2.0
"""The conversion of StarCoder."""

from nemo2.models.conversion.decoder import decoder_conversion
from nemo2.models.conversion.pieces import fused_qkv, one
from nemo2.models.conversion.positions import UNROTATED
from nemo2.models.conversion.settings import Translation
from nemo2.models.conversion.table import Row
from nemo2.models.conversion.tables.gpt3 import WITHOUT_PREFIX, conv_fields, conv_rows, gelu
from nemo2.models.starcoder import StarcoderConfig, StarcoderModel


def _rows(config: StarcoderConfig) -> list[Row]:
    """One key and value for all queries. If each head has its own, they are ordered as in Megatron-Core."""
    qkv = fused_qkv if config.num_query_groups == 1 else one
    both = qkv("attn.c_attn.weight"), qkv("attn.c_attn.bias")
    return conv_rows(config, *both, transposed=False)


STARCODER = decoder_conversion(
    "GPTBigCodeForCausalLM",
    StarcoderModel,
    StarcoderConfig,
    rows=_rows,
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
