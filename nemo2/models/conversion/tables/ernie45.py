# SPDX-License-Identifier: Apache-2.0
"""The conversions of ERNIE 4.5, dense and the text model with experts."""

from typing import Any

import torch

from nemo2.models.conversion.decoder import decoder_conversion, rows
from nemo2.models.conversion.experts import rows_with_experts, shared_experts
from nemo2.models.conversion.pieces import one
from nemo2.models.conversion.settings import Config, Field, Translation, decoder_fields, meaning, refusal
from nemo2.models.conversion.table import Row
from nemo2.models.ernie45 import ERNIE45Config, ERNIE45Model
from nemo2.models.ernie45_moe import ERNIE45MoEConfig, ERNIE45MoEModel

ERNIE45 = decoder_conversion(
    "Ernie4_5ForCausalLM",
    ERNIE45Model,
    ERNIE45Config,
    rows=rows,
    fields=[
        *decoder_fields(
            num_key_value_heads=2,
            head_dim=128,
            rms_norm_eps=1e-5,
            max_position_embeddings=131072,
            tie_word_embeddings=True,
        ),
        Field("use_bias", "add_bias_linear", False),
    ],
    only={"model_type": "ernie4_5", "hidden_act": "silu"},
    theta=500_000.0,
)


def _rows(config: ERNIE45MoEConfig) -> list[Row]:
    further = [Row("mlp.router.expert_bias", one("mlp.moe_statics.e_score_correction_bias", at=0), dtype=torch.float32)]
    if config.moe_shared_expert_intermediate_size:
        further += shared_experts("mlp.shared_experts.")
    return rows_with_experts(config, further)


def _ours(hf: Config) -> dict[str, Any]:
    layers, every = hf["num_hidden_layers"], hf.get("moe_layer_interval", 1)
    first, last = hf.get("moe_layer_start_index", 1), hf.get("moe_layer_end_index", -1)
    last = layers - 1 if last == -1 else last
    experts_in = [int(first <= layer <= last and (layer + 1) % every == 0) for layer in range(layers)]
    if not any(experts_in):
        raise refusal(hf, "moe_layer_start_index", "nemo2's model needs experts in some layer")
    shared = hf.get("moe_num_shared_experts", 2) * hf.get("moe_intermediate_size", 1536)
    return {"moe_layer_freq": experts_in, "moe_shared_expert_intermediate_size": shared or None}


def _theirs(ours: ERNIE45MoEConfig) -> dict[str, Any]:
    experts_in = meaning(ours)["experts_in"]
    first = experts_in.index(1)
    every = (experts_in[first + 1 :] + [1]).index(1) + 1
    return {
        "moe_layer_start_index": first,
        "moe_layer_end_index": len(experts_in) - 1 - experts_in[::-1].index(1),
        "moe_layer_interval": every,
        "moe_num_shared_experts": (ours.moe_shared_expert_intermediate_size or 0) // (ours.moe_ffn_hidden_size or 1),
    }


ERNIE45_MOE = decoder_conversion(
    "Ernie4_5_MoeForCausalLM",
    ERNIE45MoEModel,
    ERNIE45MoEConfig,
    rows=_rows,
    fields=[
        *decoder_fields(
            num_key_value_heads=4, rms_norm_eps=1e-5, max_position_embeddings=131072, tie_word_embeddings=True
        ),
        Field("moe_num_experts", "num_moe_experts", 64),
        Field("moe_k", "moe_router_topk", 6),
        Field("moe_intermediate_size", "moe_ffn_hidden_size", 1536),
        Field("router_aux_loss_coef", "moe_aux_loss_coeff", 0.001),
    ],
    only={"model_type": "ernie4_5_moe", "hidden_act": "silu", "use_bias": False, "moe_norm_min": 1e-12},
    translations=[Translation(_ours, _theirs)],
    theta=500_000.0,
    ignored=("model.mtp_*",),
)
