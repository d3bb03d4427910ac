# SPDX-License-Identifier: Apache-2.0
"""ERNIE 4.5 with experts, the text model: ERNIE 4.5's attention; experts in all but the first layers, selected by softmax scores
plus a bias, beside shared ones.

Sources: the ERNIE 4.5 technical report, Baidu 2025; transformers' ``Ernie4_5_MoeConfig``, whose defaults are config.json of
baidu/ERNIE-4.5-21B-A3B-PT; config.json of ERNIE-4.5-300B-A47B-PT. The layer of multi-token prediction is not included.
"""

from dataclasses import dataclass
from typing import Any, Literal, Optional, Union

import torch

from nemo2.config.capture import configurable
from nemo2.models.conversion.decoder import decoder_conversion
from nemo2.models.conversion.experts import rows_with_experts, shared_experts
from nemo2.models.conversion.pieces import only
from nemo2.models.conversion.settings import Config, Field, Translation, decoder_fields, meaning, refusal
from nemo2.models.conversion.table import Row
from nemo2.models.decoder import GroupedExperts
from nemo2.models.ernie45 import ERNIE45Config
from nemo2.models.gpt import GPTModel
from nemo2.models.layers.biased_softmax import score_by_softmax


@configurable
@dataclass
class ERNIE45MoEConfig(GroupedExperts, ERNIE45Config):
    """Settings that both sizes of ERNIE 4.5 with experts share. Scores are a softmax (`nemo2.models.layers.biased_softmax`)."""

    num_moe_experts: Optional[int] = 64
    moe_router_score_function: Literal["softmax", "sigmoid"] = "sigmoid"
    moe_router_enable_expert_bias: bool = True
    moe_router_dtype: Optional[Literal["fp32", "fp64"]] = "fp32"
    moe_aux_loss_coeff: Union[float, list[float]] = 1e-3

    def customize_model(self, model: Any) -> None:
        super().customize_model(model)
        for layer in model.decoder.layers:
            if hasattr(layer.mlp, "router"):
                score_by_softmax(layer.mlp.router)


class ERNIE45Config21B_A3B(
    ERNIE45MoEConfig,
    num_layers=28,
    hidden_size=2560,
    num_attention_heads=20,
    num_query_groups=4,
    ffn_hidden_size=12288,
    moe_ffn_hidden_size=1536,
    moe_shared_expert_intermediate_size=3072,
    moe_layer_freq=[0] + [1] * 27,
    moe_router_topk=6,
):
    """21.8 B parameters, 3 B of them used per token; the embedding counted once (tied)."""


class ERNIE45Config300B_A47B(
    ERNIE45MoEConfig,
    num_layers=54,
    hidden_size=8192,
    num_attention_heads=64,
    num_query_groups=8,
    ffn_hidden_size=28672,
    moe_ffn_hidden_size=3584,
    moe_layer_freq=[0] * 3 + [1] * 51,
    moe_router_topk=8,
    share_embeddings_and_output_weights=False,
):
    """299.5 B parameters, 47 B of them used per token; no shared experts."""


@configurable
class ERNIE45MoEModel(GPTModel):
    """The LightningModule of ERNIE 4.5 with experts; see `GPTModel`."""


def _rows(config: ERNIE45MoEConfig) -> list[Row]:
    further = [Row("mlp.router.expert_bias", only("mlp.moe_statics.e_score_correction_bias"), dtype=torch.float32)]
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
