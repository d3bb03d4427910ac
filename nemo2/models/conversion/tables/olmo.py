# SPDX-License-Identifier: Apache-2.0
"""The conversions of OLMo 2, OLMo 3 and OLMoE."""

from typing import Any

from nemo2.models.conversion.decoder import attention, decoder, decoder_conversion, gated_feed_forward
from nemo2.models.conversion.experts import expert_weights, rows_with_experts
from nemo2.models.conversion.pieces import one
from nemo2.models.conversion.positions import positions_of
from nemo2.models.conversion.settings import (
    DERIVED,
    FULL,
    SLIDING,
    Config,
    Translation,
    alternating_windows,
    decoder_fields,
    expert_fields,
    overlaid,
    refusal,
)
from nemo2.models.conversion.table import Row, norm
from nemo2.models.olmo2 import OLMo2Config, OLMo2Model
from nemo2.models.olmo3 import OLMo3Config, OLMo3Model
from nemo2.models.olmoe import OLMoEConfig, OLMoEModel


def rows(config: OLMo2Config) -> list[Row]:
    layer = [
        *(row for row in (*attention(config), *gated_feed_forward()) if "layer_norm_" not in row.key),
        *norm("self_attention.linear_proj.post_layernorm.", one("post_attention_layernorm.")),
        *norm("mlp.linear_fc2.post_layernorm.", one("post_feedforward_layernorm.")),
    ]
    return decoder(config, layer)


OLMO2 = decoder_conversion(
    "Olmo2ForCausalLM",
    OLMo2Model,
    OLMo2Config,
    rows=rows,
    fields=decoder_fields(head_dim=DERIVED, rms_norm_eps=1e-5),
    only={"model_type": "olmo2", "hidden_act": "silu", "attention_bias": False},
)


def _flat(hf: Config) -> Config:
    """In transformers 5 each kind of layer has its own rotary positions."""
    both = hf.get("rope_parameters") or {}
    if not {FULL, SLIDING} & both.keys():
        return hf
    near, far = ({"rope_theta": 500_000.0, **(both.get(kind) or {})} for kind in (SLIDING, FULL))
    if near.get("rope_type", "default") != "default" or near["rope_theta"] != far["rope_theta"]:
        reason = "nemo2's model has one rotary base, and stretches positions in layers without a window only"
        raise refusal(hf, "rope_parameters", reason)
    return overlaid(hf, rope_parameters=far)


def _positions_of(ours: OLMo3Config) -> dict[str, Any]:
    theta, far = float(ours.rotary_base), positions_of(ours)["rope_parameters"]
    return {"rope_parameters": {FULL: far, SLIDING: {"rope_type": "default", "rope_theta": theta}}}


OLMO3 = decoder_conversion(
    "Olmo3ForCausalLM",
    OLMo3Model,
    OLMo3Config,
    rows=rows,
    fields=decoder_fields(head_dim=DERIVED, rms_norm_eps=1e-5),
    only={"model_type": "olmo3", "hidden_act": "silu", "attention_bias": False},
    translations=[alternating_windows(every=4), Translation(theirs=_positions_of)],
    theta=500_000.0,
    flat=_flat,
)


OLMOE = decoder_conversion(
    "OlmoeForCausalLM",
    OLMoEModel,
    OLMoEConfig,
    rows=rows_with_experts,
    fields=[
        *decoder_fields(head_dim=DERIVED, rms_norm_eps=1e-5, max_position_embeddings=4096),
        *expert_fields(num_experts=64, num_experts_per_tok=8, router_aux_loss_coef=0.01),
    ],
    only={"model_type": "olmoe", "hidden_act": "silu", "attention_bias": False, "clip_qkv": None},
    translations=[expert_weights()],
)
