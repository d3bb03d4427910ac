# SPDX-License-Identifier: Apache-2.0
"""StarCoder 1 and 2: GPT with LayerNorm, GELU and biases; few key-value groups.

Sources: arXiv:2305.06161, table 1; arXiv:2402.19173, table 6; the released config.json files of bigcode/starcoder and
bigcode/starcoder2-*.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Optional, Union

import torch.nn.functional as F

from nemo2.config.capture import configurable
from nemo2.models.conversion.decoder import attention, decoder, feed_forward
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
    uniform_window,
    without,
    written,
)
from nemo2.models.conversion.table import Conversion, Row
from nemo2.models.gpt import GPTConfig, GPTModel
from nemo2.models.gpt3 import WITHOUT_PREFIX, conv_fields, conv_rows, gelu_in, gelu_of


@configurable
@dataclass
class StarcoderConfig(GPTConfig):
    """StarCoder: learned positions, one key-value head for all queries."""

    # With the fusion below, Megatron-Core computes the tanh approximation, as the released models do.
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
):
    """15.5 B parameters with the 49,152-token vocabulary, the embedding counted once (tied)."""


@configurable
@dataclass
class Starcoder2Config(GPTConfig):
    """StarCoder 2: rotary positions; a token attends to itself and the 4,095 before it (arXiv:2402.19173, section 6.1)."""

    # With the fusion below, the tanh approximation, as in StarCoder.
    activation_func: Callable = F.gelu
    seq_length: int = 16384
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "rope"
    # NeMo 2.0 has no window, and so differs from the 4,097th token on.
    window_size: Optional[tuple[int, int]] = (4095, 0)
    # Transformer Engine splits a sequence with a window over context-parallel ranks only by all-to-all.
    cp_comm_type: Optional[Union[str, list[str]]] = "a2a"
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    init_method_std: float = 0.01
    share_embeddings_and_output_weights: bool = False
    attention_softmax_in_fp32: bool = True
    bias_activation_fusion: bool = True
    bias_dropout_fusion: bool = True


class Starcoder2Config3B(
    Starcoder2Config,
    num_layers=30,
    hidden_size=3072,
    ffn_hidden_size=12288,
    num_query_groups=2,
    num_attention_heads=24,
    init_method_std=0.018042,
    share_embeddings_and_output_weights=True,
):
    """3.03 B parameters with the 49,152-token vocabulary, the embedding counted once (tied)."""

    rotary_base: float = 999999.4420358813


class Starcoder2Config7B(
    Starcoder2Config,
    num_layers=32,
    hidden_size=4608,
    ffn_hidden_size=18432,
    num_query_groups=4,
    num_attention_heads=36,
    init_method_std=0.018042,
    rotary_base=1_000_000,
    share_embeddings_and_output_weights=True,
):
    """7.17 B parameters with the 49,152-token vocabulary, the embedding counted once (tied)."""


class Starcoder2Config15B(
    Starcoder2Config,
    num_layers=40,
    hidden_size=6144,
    ffn_hidden_size=24576,
    num_query_groups=4,
    num_attention_heads=48,
    init_method_std=0.01275,
    rotary_base=100_000,
):
    """16.0 B parameters with the 49,152-token vocabulary."""


@configurable
class StarcoderModel(GPTModel):
    """The LightningModule of StarCoder; see `GPTModel`."""


@configurable
class Starcoder2Model(GPTModel):
    """The LightningModule of StarCoder 2; see `GPTModel`."""


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


def _rows_1(config: StarcoderConfig) -> list[Row]:
    """One key and value for all queries. If each head has its own, they are ordered as in Megatron-Core."""
    qkv = fused_qkv if config.num_query_groups == 1 else one
    both = qkv("attn.c_attn.weight"), qkv("attn.c_attn.bias")
    return conv_rows(config, *both, transposed=False)


def _rows_2(config: Starcoder2Config) -> list[Row]:
    layer = [
        *attention(config, norm_bias=True),
        *feed_forward(one("mlp.c_fc."), "mlp.c_proj.", bias=True, norm_bias=True),
    ]
    return decoder(config, layer, norm_bias=True)


def _config_1(hf: Config) -> StarcoderConfig:
    fields = read(hf, _FIELDS_1, only=_ONLY_1)
    groups = 1 if hf.get("multi_query", True) else fields["num_attention_heads"]
    return StarcoderConfig(**fields, **gelu_of(hf, default="gelu_pytorch_tanh"), num_query_groups=groups)


def _hf_config_1(ours: StarcoderConfig) -> dict[str, Any]:
    hf = {
        **written(ours, _FIELDS_1, only=_ONLY_1),
        "activation_function": gelu_in(ours, "gelu_pytorch_tanh"),
        "embd_pdrop": ours.hidden_dropout,
        "multi_query": ours.num_query_groups == 1,
    }
    return said(ours, hf, _config_1)


def _config_2(hf: Config) -> Starcoder2Config:
    fields = read(hf, _FIELDS_2, only=_ONLY_2)
    if hf.get("embedding_dropout", 0.0) != fields["hidden_dropout"]:
        raise refusal(
            hf, "embedding_dropout", f"nemo2's model needs residual_dropout's value, {fields['hidden_dropout']}"
        )
    return Starcoder2Config(**fields, **uniform_window(hf), rotary_base=rope_of(hf).theta)


def _hf_config_2(ours: Starcoder2Config) -> dict[str, Any]:
    hf = {
        **written(ours, _FIELDS_2, only=_ONLY_2),
        "num_key_value_heads": ours.num_query_groups or ours.num_attention_heads,
        "embedding_dropout": ours.hidden_dropout,
        "sliding_window": size_of(ours.window_size),
        **rope_fields(ours.rotary_base),
    }
    return said(ours, hf, _config_2)


STARCODER = Conversion(
    architectures=("GPTBigCodeForCausalLM",),
    model=StarcoderModel,
    configs=(StarcoderConfig,),
    rows=_rows_1,
    config=_config_1,
    hf_config=_hf_config_1,
    biased=("add_bias_linear",),
    ignored=("*.attn.bias", "*.attn.masked_bias"),
    renamed=WITHOUT_PREFIX,
)

STARCODER2 = Conversion(
    architectures=("Starcoder2ForCausalLM",),
    model=Starcoder2Model,
    configs=(Starcoder2Config,),
    rows=_rows_2,
    config=_config_2,
    hf_config=_hf_config_2,
)
