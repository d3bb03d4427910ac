# SPDX-License-Identifier: Apache-2.0
"""Mixtral: Mistral's decoder with eight experts in every layer, of which each token uses two.

Sources: arXiv:2401.04088, table 1; the released config.json files of mistralai/Mixtral-8x7B-v0.1 and 8x22B-v0.1.
"""

from dataclasses import dataclass
from typing import Any, Literal, Optional, Union

from nemo2.config.capture import configurable
from nemo2.models.conversion.decoder import attention, decoder, decoder_conversion
from nemo2.models.conversion.pieces import cat, one
from nemo2.models.conversion.settings import Field, decoder_fields, expert_fields, uniform_window
from nemo2.models.conversion.table import Row, linear, norm
from nemo2.models.decoder import DecoderConfig
from nemo2.models.gpt import GPTModel


@configurable
@dataclass
class MixtralConfig(DecoderConfig):
    """Settings that all Mixtral models share; the default sizes are those of 8x7B."""

    num_layers: int = 32
    hidden_size: int = 4096
    num_attention_heads: int = 32
    num_query_groups: Optional[int] = 8
    ffn_hidden_size: Optional[int] = 14336
    max_position_embeddings: int = 4096
    """The longest sequence in the config.json of exported weights. Training does not read it."""
    seq_length: int = 4096
    num_moe_experts: Optional[int] = 8
    moe_aux_loss_coeff: Union[float, list[float]] = 0.01
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = "alltoall"
    rotary_base: int = 1_000_000
    apply_rope_fusion: bool = True
    bias_activation_fusion: bool = True
    bias_dropout_fusion: bool = True
    masked_softmax_fusion: bool = False


class MixtralConfig8x3B(MixtralConfig, hidden_size=2560, ffn_hidden_size=8960):
    """18.3 B parameters with the 32,000-token vocabulary. NVIDIA's size for benchmarks; no weights exist."""


@configurable
@dataclass
class MixtralConfig8x7B(MixtralConfig):
    """46.7 B parameters with the 32,000-token vocabulary, 12.9 B of them used per token."""


class MixtralConfig8x22B(MixtralConfig, num_layers=56, hidden_size=6144, num_attention_heads=48, ffn_hidden_size=16384):
    """140.6 B parameters with the 32,000-token vocabulary, 39 B of them used per token."""


@configurable
class MixtralModel(GPTModel):
    """The LightningModule of Mixtral; see `GPTModel`."""

    default_config = MixtralConfig8x7B


_FIELDS = [
    *decoder_fields(num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5),
    Field("max_position_embeddings", "max_position_embeddings", 131072),
    *expert_fields(num_local_experts=8, num_experts_per_tok=2, router_aux_loss_coef=0.001),
]
_ONLY = {"model_type": "mixtral", "hidden_act": "silu"}


def rows(config: Any) -> list[Row]:
    expert = "block_sparse_moe.experts.*."
    layer = [
        *attention(config),
        *norm("pre_mlp_layernorm.", one("post_attention_layernorm.")),
        Row("mlp.router.weight", one("block_sparse_moe.gate.weight")),
        *linear("mlp.experts.experts.linear_fc1.", cat(f"{expert}w1.", f"{expert}w3.")),
        *linear("mlp.experts.experts.linear_fc2.", one(f"{expert}w2.")),
    ]
    return decoder(config, layer)


MIXTRAL = decoder_conversion(
    "MixtralForCausalLM",
    MixtralModel,
    MixtralConfig,
    rows=rows,
    fields=_FIELDS,
    only=_ONLY,
    translations=[uniform_window()],
    theta=1_000_000.0,
)
