# SPDX-License-Identifier: Apache-2.0
"""The conversions of Mistral, Mixtral, the text model of Ministral 3, and MiniMax M2 under Mixtral's names."""

from typing import Any

import torch

from nemo2.models.conversion.decoder import attention, decoder, decoder_conversion, rows
from nemo2.models.conversion.pieces import cat, one
from nemo2.models.conversion.positions import positions_of
from nemo2.models.conversion.settings import (
    Config,
    Field,
    Translation,
    decoder_fields,
    expert_fields,
    overlaid,
    refusal,
    text_config,
    uniform_window,
)
from nemo2.models.conversion.table import IN_VISION_MODEL, Row, linear, norm
from nemo2.models.minimax_m2 import MiniMaxM2Config, MiniMaxM2Model
from nemo2.models.ministral3 import Ministral3Config, Ministral3Model
from nemo2.models.mistral import MistralConfig7B, MistralModel
from nemo2.models.mixtral import MixtralConfig, MixtralModel

MISTRAL = decoder_conversion(
    "MistralForCausalLM",
    MistralModel,
    MistralConfig7B,
    rows=rows,
    fields=decoder_fields(num_key_value_heads=8, max_position_embeddings=131072),
    only={"model_type": "mistral", "hidden_act": "silu"},
    translations=[uniform_window(4096)],
    flat=text_config,
    also=("Mistral3ForConditionalGeneration",),
    **IN_VISION_MODEL,
)


_FIELDS = [
    *decoder_fields(num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5),
    Field("max_position_embeddings", "max_position_embeddings", 131072),
    *expert_fields(num_local_experts=8, num_experts_per_tok=2, router_aux_loss_coef=0.001),
]
_ONLY = {"model_type": "mixtral", "hidden_act": "silu"}


def mixtral_rows(config: Any) -> list[Row]:
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
    rows=mixtral_rows,
    fields=_FIELDS,
    only=_ONLY,
    translations=[uniform_window()],
    theta=1_000_000.0,
)


_ROPE = {"type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "original_max_position_embeddings": 16384}
_ROPE |= {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
_GROWTH = "llama_4_scaling_beta"


def _flat(released: Config) -> Config:
    hf = text_config(released)
    rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or _ROPE)
    rope.pop("max_position_embeddings", None)  # repeats the field outside
    growth = rope.pop(_GROWTH, None)
    if rope.get("rope_type", rope.get("type")) != "yarn" or growth is None:
        raise refusal(hf, "rope_parameters", f"nemo2's model supports only the kind 'yarn' with {_GROWTH}")
    return overlaid(hf, **{"rope_parameters": rope, "rope_scaling": None, _GROWTH: growth})


def _theirs(ours: Ministral3Config) -> dict[str, Any]:
    fields = positions_of(ours)
    return {
        name: {**fields[name], _GROWTH: ours.query_growth}
        for name in ("rope_parameters", "rope_scaling") & fields.keys()
    }


MINISTRAL3 = decoder_conversion(
    "Ministral3ForCausalLM",
    Ministral3Model,
    Ministral3Config,
    rows=rows,
    fields=[
        *decoder_fields(num_key_value_heads=8, head_dim=128, max_position_embeddings=262144, rms_norm_eps=1e-5),
        Field(_GROWTH, "query_growth"),
    ],
    only={"model_type": "ministral3", "hidden_act": "silu", "sliding_window": None},
    translations=[Translation(theirs=_theirs)],
    flat=_flat,
    also=("Mistral3ForConditionalGeneration",),
    text_types=("ministral3",),
    **IN_VISION_MODEL,
)


def _rows(config: MiniMaxM2Config) -> list[Row]:
    bias = one("model.layers.*.block_sparse_moe.e_score_correction_bias")
    return [*mixtral_rows(config), Row("decoder.layers.*.mlp.router.expert_bias", bias, dtype=torch.float32)]


def _rotated(hf: Config) -> dict[str, Any]:
    """The release names the number of rotated channels."""
    return {"rotary_percent": hf["rotary_dim"] / hf.get("head_dim", 128)} if hf.get("rotary_dim") else {}


MINIMAX_M2 = decoder_conversion(
    "MiniMaxM2ForCausalLM",
    MiniMaxM2Model,
    MiniMaxM2Config,
    rows=_rows,
    fields=[
        *decoder_fields(num_key_value_heads=8, head_dim=128, max_position_embeddings=196608),
        *expert_fields(num_local_experts=256, num_experts_per_tok=8, router_aux_loss_coef=0.001),
    ],
    only={"model_type": "minimax_m2", "hidden_act": "silu", "router_jitter_noise": 0.0},
    translations=[Translation(_rotated)],
    theta=5_000_000.0,
    partial=1.0,
)
