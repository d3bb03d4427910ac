# SPDX-License-Identifier: Apache-2.0
"""The conversion of Mixtral."""

from typing import Any

from nemo2.models.conversion.decoder import attention, decoder, decoder_conversion
from nemo2.models.conversion.pieces import cat, one
from nemo2.models.conversion.settings import Field, decoder_fields, expert_fields, uniform_window
from nemo2.models.conversion.table import Row, linear, norm
from nemo2.models.mixtral import MixtralConfig, MixtralModel

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
