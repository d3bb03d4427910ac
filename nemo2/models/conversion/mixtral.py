# SPDX-License-Identifier: Apache-2.0
"""Mixtral."""

from typing import Any

from nemo2.models.conversion.llama import attention, decoder
from nemo2.models.conversion.pieces import cat, one
from nemo2.models.conversion.positions import KINDS, positions, positions_of, rope_of
from nemo2.models.conversion.settings import Config, Field, decoder_fields, read, said, size_of, window_of, written
from nemo2.models.conversion.table import Conversion, Row, linear, norm
from nemo2.models.mixtral import MixtralConfig, MixtralModel

_FIELDS = [
    *decoder_fields(num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5),
    Field("num_local_experts", "num_moe_experts", 8),
    Field("num_experts_per_tok", "moe_router_topk", 2),
    Field("router_aux_loss_coef", "moe_aux_loss_coeff", 0.001),
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


def config(hf: Config) -> MixtralConfig:
    fields = read(hf, _FIELDS, only=_ONLY)
    return MixtralConfig(
        **fields,
        max_position_embeddings=fields["seq_length"],
        **positions(hf, rope_of(hf, theta=1_000_000.0, kinds=KINDS), longest=fields["seq_length"]),
        window_size=window_of(hf.get("sliding_window")),
    )


def hf_config(ours: MixtralConfig) -> dict[str, Any]:
    hf = {
        **written(ours, _FIELDS, only=_ONLY),
        "max_position_embeddings": ours.max_position_embeddings,
        "sliding_window": size_of(ours.window_size),
        **positions_of(ours),
    }
    return said(ours, hf, config)


MIXTRAL = Conversion(
    architectures=("MixtralForCausalLM",),
    model=MixtralModel,
    configs=(MixtralConfig,),
    rows=rows,
    config=config,
    hf_config=hf_config,
)
