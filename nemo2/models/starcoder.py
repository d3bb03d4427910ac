# SPDX-License-Identifier: Apache-2.0
"""StarCoder: GPT-2's decoder with one key-value head for all queries.

Sources: arXiv:2305.06161, table 1; the released config.json of bigcode/starcoder.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Optional

import torch.nn.functional as F

from nemo2.config.capture import configurable
from nemo2.models.conversion.decoder import decoder_conversion
from nemo2.models.conversion.pieces import fused_qkv, one
from nemo2.models.conversion.positions import UNROTATED
from nemo2.models.conversion.settings import Translation
from nemo2.models.conversion.table import Row
from nemo2.models.gpt import GPTConfig, GPTModel
from nemo2.models.gpt3 import WITHOUT_PREFIX, conv_fields, conv_rows, gelu


@configurable
@dataclass
class StarcoderConfig(GPTConfig):
    """StarCoder: learned positions, one key-value head for all queries."""

    # With the fusion below, Megatron-Core computes the tanh approximation, as bigcode/tiny_starcoder_py does.
    activation_func: Callable = F.gelu
    seq_length: int = 8192
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "learned_absolute"
    hidden_dropout: float = 0.2
    attention_dropout: float = 0.2
    init_method_std: float = 0.01
    # NeMo 2.0 unties it, which adds 0.3 B parameters to the released 15.5 B.
    share_embeddings_and_output_weights: bool = True
    num_query_groups: Optional[int] = 1
    attention_softmax_in_fp32: bool = True
    bias_activation_fusion: bool = True
    bias_dropout_fusion: bool = True


class StarcoderConfig15B(
    StarcoderConfig,
    num_layers=40,
    hidden_size=6144,
    ffn_hidden_size=24576,
    num_attention_heads=48,
    init_method_std=0.02,
    bias_activation_fusion=False,
):
    """15.5 B parameters with the 49,152-token vocabulary, the embedding counted once (tied). Its GELU is exact."""


@configurable
class StarcoderModel(GPTModel):
    """The LightningModule of StarCoder; see `GPTModel`."""


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
