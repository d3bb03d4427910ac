# SPDX-License-Identifier: Apache-2.0
"""The conversion of OLMoE."""

from nemo2.models.conversion.decoder import decoder_conversion
from nemo2.models.conversion.experts import expert_weights, rows_with_experts
from nemo2.models.conversion.settings import DERIVED, decoder_fields, expert_fields
from nemo2.models.olmoe import OLMoEConfig, OLMoEModel

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
