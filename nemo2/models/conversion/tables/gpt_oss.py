# SPDX-License-Identifier: Apache-2.0
"""The conversion of GPT-OSS 20B and 120B."""

from nemo2.models.conversion.decoder import attention, decoder, decoder_conversion
from nemo2.models.conversion.pieces import every_other, one
from nemo2.models.conversion.positions import own_scaling
from nemo2.models.conversion.settings import (
    Field,
    Translation,
    alternating_windows,
    decoder_fields,
    expert_fields,
    without,
)
from nemo2.models.conversion.table import Row, linear, norm
from nemo2.models.gpt_oss import GPTOSSConfig, GPTOSSModel

_FIELDS = [
    *without(
        decoder_fields(num_key_value_heads=8, head_dim=64, max_position_embeddings=131072, rms_norm_eps=1e-5),
        "intermediate_size",
    ),
    Field("intermediate_size", "moe_ffn_hidden_size", 2880),
    *expert_fields(num_local_experts=128, num_experts_per_tok=4),
    Field("swiglu_limit", "activation_func_clamp_value", 7.0),
]
_ONLY = {"model_type": "gpt_oss", "hidden_act": "silu", "attention_bias": True, "swiglu_alpha": 1.702}
_YARN = {
    "factor": ("yarn_rotary_scaling_factor", 1.0),
    "beta_fast": ("yarn_beta_fast", 32.0),
    "beta_slow": ("yarn_beta_slow", 1.0),
    "original_max_position_embeddings": ("yarn_original_max_position_embeddings", 4096),
    "truncate": ("yarn_correction_range_round_to_int", True),
}


def _rows(config: GPTOSSConfig) -> list[Row]:
    """Experts are stacked and stored [in, out], and the rows of an expert's gate and up projection alternate."""
    experts = "mlp.experts.experts"
    layer = [
        *attention(config),
        Row("self_attention.core_attention.softmax_offset", one("self_attn.sinks")),
        *norm("pre_mlp_layernorm.", one("post_attention_layernorm.")),
        *linear("mlp.router.", one("mlp.router."), bias=True),
        Row(f"{experts}.linear_fc1.weight", every_other("mlp.experts.gate_up_proj", stacked=True, transposed=True)),
        Row(f"{experts}.linear_fc1.bias", every_other("mlp.experts.gate_up_proj_bias", stacked=True)),
        Row(f"{experts}.linear_fc2.weight", one("mlp.experts.down_proj", stacked=True, transposed=True)),
        Row(f"{experts}.linear_fc2.bias", one("mlp.experts.down_proj_bias", stacked=True)),
    ]
    return decoder(config, layer)


GPT_OSS = decoder_conversion(
    "GptOssForCausalLM",
    GPTOSSModel,
    GPTOSSConfig,
    rows=_rows,
    fields=_FIELDS,
    only=_ONLY,
    translations=[
        alternating_windows(every=2, size=128),
        Translation(
            lambda hf: {"ffn_hidden_size": hf.get("intermediate_size", 2880)},
            lambda own: {"experts_per_token": own.moe_router_topk},
        ),
    ],
    rotary=own_scaling(
        "yarn",
        _YARN,
        on={"position_embedding_type": "yarn"},
        # Megatron-Core scales queries and keys by this factor even if positions aren't stretched.
        off={"position_embedding_type": "rope", "yarn_rotary_scaling_factor": 1.0},
        theta=150_000.0,
    ),
)
