# SPDX-License-Identifier: Apache-2.0
"""The conversion of DeepSeek V2, V2-Lite and V3, Moonlight and Kimi K2."""

from functools import partial
from typing import Any

from nemo2.models.conversion.decoder import decoder, decoder_conversion, gated_feed_forward
from nemo2.models.conversion.experts import (
    FURTHER_PREDICTIONS,
    REPEATED,
    beside_experts,
    check_routing,
    dense_or_experts,
    dense_then_experts,
    experts,
    further_predictions,
)
from nemo2.models.conversion.pieces import one
from nemo2.models.conversion.positions import own_scaling, rope_of
from nemo2.models.conversion.settings import (
    NEEDED,
    Config,
    Field,
    Translation,
    decoder_fields,
    expert_fields,
    overlaid,
    read,
    refusal,
    without,
)
from nemo2.models.conversion.table import Row, linear, norm
from nemo2.models.deepseek import DeepSeekConfig, DeepSeekModel, DeepSeekV2Config, DeepSeekV3Config

_FIELDS = [
    # Every head has its own key and value, derived from the latent.
    *without(decoder_fields(), "num_key_value_heads", "head_dim", "max_position_embeddings"),
    Field("q_lora_rank", "q_lora_rank", 1536),
    Field("kv_lora_rank", "kv_lora_rank", 512),
    Field("qk_nope_head_dim", "qk_head_dim", 128),
    Field("qk_rope_head_dim", "qk_pos_emb_head_dim", 64),
    Field("v_head_dim", "v_head_dim", 128),
    *expert_fields(
        n_routed_experts=NEEDED, num_experts_per_tok=NEEDED, moe_intermediate_size=NEEDED, routed_scaling_factor=1.0
    ),
    Field("n_group", "moe_router_num_groups", None),
    Field("topk_group", "moe_router_group_topk", None),
]
_ONLY = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "moe_layer_freq": 1, "ep_size": 1}
_YARN = {
    "factor": ("rotary_scaling_factor", NEEDED),
    "beta_fast": ("beta_fast", 32),
    "beta_slow": ("beta_slow", 1),
    "mscale": ("mscale", NEEDED),
    "mscale_all_dim": ("mscale_all_dim", NEEDED),
    "original_max_position_embeddings": ("original_max_position_embeddings", NEEDED),
}


def _rows(config: DeepSeekConfig) -> list[Row]:
    layers = dense_or_experts(config, dense=gated_feed_forward(), experts=[*experts(), *beside_experts(config)])
    layer = [*_attention(config), *layers]
    return decoder(config, layer) + further_predictions(config, _attention(config))


def _attention(config: DeepSeekConfig) -> list[Row]:
    """Latents of queries (except in V2-Lite) and of keys and values, each with its norm."""
    queries = [
        *linear("self_attention.linear_q_down_proj.", one("self_attn.q_a_proj.")),
        *norm("self_attention.linear_q_up_proj.layer_norm_", one("self_attn.q_a_layernorm.")),
        *linear("self_attention.linear_q_up_proj.", one("self_attn.q_b_proj.")),
    ]
    return [
        *norm("input_layernorm.", one("input_layernorm.")),
        *(queries if config.q_lora_rank else linear("self_attention.linear_q_proj.", one("self_attn.q_proj."))),
        *linear("self_attention.linear_kv_down_proj.", one("self_attn.kv_a_proj_with_mqa.")),
        *norm("self_attention.linear_kv_up_proj.layer_norm_", one("self_attn.kv_a_layernorm.")),
        *linear("self_attention.linear_kv_up_proj.", one("self_attn.kv_b_proj.")),
        *linear("self_attention.linear_proj.", one("self_attn.o_proj.")),
    ]


def _ours(hf: Config) -> dict[str, Any]:
    length = hf.get("max_position_embeddings", 2048)
    scaling = rope_of(hf, kinds=("default", "yarn")).scaling
    return {
        "seq_length": scaling.get("original_max_position_embeddings", length),
        "kv_channels": hf.get("qk_nope_head_dim", 128),
        "moe_shared_expert_overlap": bool(hf.get("n_shared_experts")),
    }


def _theirs(ours: DeepSeekConfig) -> dict[str, Any]:
    factor = ours.rotary_scaling_factor if ours.rope_type == "yarn" else 1
    return {
        "num_key_value_heads": ours.num_attention_heads,
        "max_position_embeddings": max(ours.seq_length, int(ours.original_max_position_embeddings * factor)),
    }


_COMMON = [Translation(_ours, _theirs), dense_then_experts()]


def _groups(hf: Config) -> dict[str, Any]:
    method = hf.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise refusal(hf, "topk_method", "nemo2's DeepSeek V2 supports 'greedy' and 'group_limited_greedy'")
    return {"moe_router_num_groups": None, "moe_router_group_topk": None} if method == "greedy" else {}


def _groups_of(ours: DeepSeekV2Config) -> dict[str, Any]:
    return {"topk_method": "group_limited_greedy" if (ours.moe_router_num_groups or 1) > 1 else "greedy"}


def _check_routing(hf: Config) -> dict[str, Any]:
    check_routing(hf, read(hf, _FIELDS))
    return {}


def _flat_v3(hf: Config) -> Config:
    """Kimi K2 has another name of the same class."""
    return overlaid(hf, model_type="deepseek_v3") if hf.get("model_type") == "kimi_k2" else hf


_conversion = partial(
    decoder_conversion,
    model=DeepSeekModel,
    rows=_rows,
    fields=_FIELDS,
    # Megatron-Core scales the scores by this factor even if positions aren't stretched.
    rotary=own_scaling(
        "yarn", _YARN, on={"rope_type": "yarn"}, off={"rope_type": "rope", "rotary_scaling_factor": 1.0}
    ),
)
DEEPSEEK_V2 = _conversion(
    "DeepseekV2ForCausalLM",
    kind=DeepSeekV2Config,
    only=_ONLY | {"model_type": "deepseek_v2", "scoring_func": "softmax", "norm_topk_prob": False},
    translations=[*_COMMON, Translation(_groups, _groups_of)],
)
DEEPSEEK_V3 = _conversion(
    "DeepseekV3ForCausalLM",
    kind=DeepSeekV3Config,
    only=_ONLY
    | {"model_type": "deepseek_v3", "scoring_func": "sigmoid", "norm_topk_prob": True}
    | {"topk_method": "noaux_tc", "rope_interleave": True},
    translations=[Translation(_check_routing), *_COMMON, FURTHER_PREDICTIONS],
    flat=_flat_v3,
    ignored=REPEATED,
)
