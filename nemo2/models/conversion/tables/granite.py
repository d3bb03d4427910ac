# SPDX-License-Identifier: Apache-2.0
"""The conversions of Granite 3, dense and with experts."""

from nemo2.models.conversion.decoder import BIASES, attention, decoder, decoder_conversion, rows, unbiased
from nemo2.models.conversion.pieces import one
from nemo2.models.conversion.settings import DERIVED, Field, Translation, decoder_fields, expert_fields
from nemo2.models.conversion.table import Row, norm
from nemo2.models.granite import GraniteConfig, GraniteModel
from nemo2.models.granite_moe import GraniteMoEConfig, GraniteMoEModel, GraniteMoESharedConfig

FIELDS = [
    *decoder_fields(head_dim=DERIVED),
    Field("embedding_multiplier", "embedding_multiplier", 1.0),
    Field("residual_multiplier", "residual_multiplier", 1.0),
    Field("attention_multiplier", "softmax_scale", 1.0),
    Field("logits_scaling", "logits_scaling", 1.0),
]

GRANITE = decoder_conversion(
    "GraniteForCausalLM",
    GraniteModel,
    GraniteConfig,
    rows=rows,
    fields=FIELDS,
    only={"model_type": "granite", "hidden_act": "silu"},
    translations=[BIASES],
    unbiased=unbiased,
)


def _rows(config: GraniteMoEConfig) -> list[Row]:
    routed, shared = "block_sparse_moe.", "shared_mlp."
    layer = [
        *attention(config),
        *norm("pre_mlp_layernorm.", one("post_attention_layernorm.")),
        Row("mlp.router.weight", one(f"{routed}router.layer.weight")),
        Row("mlp.experts.experts.linear_fc1.weight", one(f"{routed}input_linear.weight", stacked=True)),
        Row("mlp.experts.experts.linear_fc2.weight", one(f"{routed}output_linear.weight", stacked=True)),
    ]
    if config.moe_shared_expert_intermediate_size:
        layer += [
            Row("mlp.shared_experts.linear_fc1.weight", one(f"{shared}input_linear.weight")),
            Row("mlp.shared_experts.linear_fc2.weight", one(f"{shared}output_linear.weight")),
        ]
    return decoder(config, layer)


_FIELDS = [*FIELDS, *expert_fields(num_local_experts=8, num_experts_per_tok=2, router_aux_loss_coef=0.001)]
_ONLY = {"hidden_act": "silu", "attention_bias": False}

GRANITE_MOE = decoder_conversion(
    "GraniteMoeForCausalLM",
    GraniteMoEModel,
    GraniteMoEConfig,
    rows=_rows,
    fields=_FIELDS,
    only={"model_type": "granitemoe", **_ONLY},
)
GRANITE_MOE_SHARED = decoder_conversion(
    "GraniteMoeSharedForCausalLM",
    GraniteMoEModel,
    GraniteMoESharedConfig,
    rows=_rows,
    fields=_FIELDS,
    only={"model_type": "granitemoeshared", **_ONLY},
    translations=[
        Translation(
            lambda hf: {"moe_shared_expert_intermediate_size": hf.get("shared_intermediate_size") or None},
            lambda own: {"shared_intermediate_size": own.moe_shared_expert_intermediate_size or 0},
        )
    ],
)
