# SPDX-License-Identifier: Apache-2.0
"""GPT-OSS."""

from typing import Any

from nemo2.models.conversion.llama import attention, decoder
from nemo2.models.conversion.pieces import every_other, one
from nemo2.models.conversion.positions import rope_fields, rope_of, scaled
from nemo2.models.conversion.settings import (
    FULL,
    SLIDING,
    Config,
    Field,
    decoder_fields,
    layer_types,
    pattern_of,
    read,
    said,
    size_of,
    window_of,
    without,
    written,
)
from nemo2.models.conversion.table import Conversion, Row, linear, norm
from nemo2.models.gpt_oss import GPTOSSConfig, GPTOSSModel

_FIELDS = [
    *without(
        decoder_fields(num_key_value_heads=8, head_dim=64, max_position_embeddings=131072, rms_norm_eps=1e-5),
        "intermediate_size",
    ),
    Field("intermediate_size", "moe_ffn_hidden_size", 2880),
    Field("num_local_experts", "num_moe_experts", 128),
    Field("num_experts_per_tok", "moe_router_topk", 4),
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


def rows(config: GPTOSSConfig) -> list[Row]:
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


def config(hf: Config) -> GPTOSSConfig:
    fields = read(hf, _FIELDS, only=_ONLY)
    rope = rope_of(hf, theta=150_000.0, kinds=("default", "yarn"))
    # Megatron-Core scales queries and keys by this factor even if positions aren't stretched.
    positions: dict[str, Any] = {"position_embedding_type": "rope", "yarn_rotary_scaling_factor": 1.0}
    if rope.kind == "yarn":
        positions = scaled(hf, rope, _YARN)
    types = hf.get("layer_types") or [FULL if layer % 2 else SLIDING for layer in range(fields["num_layers"])]
    return GPTOSSConfig(
        **fields,
        **positions,
        ffn_hidden_size=fields["moe_ffn_hidden_size"],
        rotary_base=rope.theta,
        window_size=window_of(hf.get("sliding_window", 128)),
        window_attn_skip_freq=pattern_of(hf, types),
    )


def hf_config(ours: GPTOSSConfig) -> dict[str, Any]:
    yarn = ours.position_embedding_type == "yarn"
    scaling = {theirs: getattr(ours, name) for theirs, (name, _) in _YARN.items()} if yarn else {}
    hf = {
        **written(ours, _FIELDS, only=_ONLY),
        "experts_per_token": ours.moe_router_topk,
        "sliding_window": size_of(ours.window_size),
        "layer_types": layer_types(ours),
        **rope_fields(ours.rotary_base, kind="yarn" if yarn else "default", **scaling),
    }
    return said(ours, hf, config)


GPT_OSS = Conversion(
    architectures=("GptOssForCausalLM",),
    model=GPTOSSModel,
    configs=(GPTOSSConfig,),
    rows=rows,
    config=config,
    hf_config=hf_config,
)
