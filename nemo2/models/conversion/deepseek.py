# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V2, V2-Lite and V3."""

from dataclasses import replace
from typing import Any

import torch

from nemo2.models.conversion.llama import decoder, gated_feed_forward
from nemo2.models.conversion.pieces import cat, one
from nemo2.models.conversion.positions import rope_fields, rope_of, scaled
from nemo2.models.conversion.qwen3 import experts
from nemo2.models.conversion.settings import (
    NEEDED,
    Config,
    Field,
    decoder_fields,
    meaning,
    read,
    refusal,
    said,
    without,
    written,
)
from nemo2.models.conversion.table import Conversion, Row, linear, norm, under
from nemo2.models.deepseek import DeepSeekConfig, DeepSeekModel, DeepSeekV2Config, DeepSeekV3Config

_LATENT = [
    # Every head has its own key and value, derived from the latent.
    *without(decoder_fields(), "num_key_value_heads", "head_dim", "max_position_embeddings"),
    Field("q_lora_rank", "q_lora_rank", 1536),
    Field("kv_lora_rank", "kv_lora_rank", 512),
    Field("qk_nope_head_dim", "qk_head_dim", 128),
    Field("qk_rope_head_dim", "qk_pos_emb_head_dim", 64),
    Field("v_head_dim", "v_head_dim", 128),
    Field("n_routed_experts", "num_moe_experts"),
    Field("num_experts_per_tok", "moe_router_topk"),
    Field("moe_intermediate_size", "moe_ffn_hidden_size"),
    Field("routed_scaling_factor", "moe_router_topk_scaling_factor", 1.0),
]
_GROUPS = [Field("n_group", "moe_router_num_groups", None), Field("topk_group", "moe_router_group_topk", None)]
_ONLY = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "moe_layer_freq": 1, "ep_size": 1}
_ONLY_2 = _ONLY | {"model_type": "deepseek_v2", "scoring_func": "softmax", "norm_topk_prob": False}
_ONLY_3 = _ONLY | {"model_type": "deepseek_v3", "scoring_func": "sigmoid", "norm_topk_prob": True}
_ONLY_3 |= {"topk_method": "noaux_tc", "rope_interleave": True}
_YARN = {
    "factor": ("rotary_scaling_factor", NEEDED),
    "beta_fast": ("beta_fast", 32),
    "beta_slow": ("beta_slow", 1),
    "mscale": ("mscale", NEEDED),
    "mscale_all_dim": ("mscale_all_dim", NEEDED),
    "original_max_position_embeddings": ("original_max_position_embeddings", NEEDED),
}


def rows(config: DeepSeekConfig) -> list[Row]:
    flags = meaning(config)["experts_in"]
    dense = [layer for layer, experts_here in enumerate(flags) if not experts_here]
    sparse = [layer for layer, experts_here in enumerate(flags) if experts_here]
    layer = [
        *_attention(config),
        *(replace(row, layers=dense) for row in gated_feed_forward()),
        *(replace(row, layers=sparse) for row in _experts(config)),
    ]
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


def _experts(config: Any) -> list[Row]:
    return [*experts(), *beside_experts(config)]


def beside_experts(config: Any) -> list[Row]:
    """The bias of the router and the shared experts, under names that GLM-4.5 shares."""
    found: list[Row] = []
    shared = "mlp.shared_experts."
    if config.moe_router_enable_expert_bias:
        found.append(Row("mlp.router.expert_bias", one("mlp.gate.e_score_correction_bias"), dtype=torch.float32))
    if config.moe_shared_expert_intermediate_size:
        found += linear(f"{shared}linear_fc1.", cat(f"{shared}gate_proj.", f"{shared}up_proj."))
        found += linear(f"{shared}linear_fc2.", one(f"{shared}down_proj."))
    return found


def further_predictions(config: Any, attention: list[Row]) -> list[Row]:
    """The layers of multi-token prediction, after the last layer. The file repeats the embedding and the output layer for
    them, which are not read again (`REPEATED`)."""
    layer = [
        *norm("enorm.", one("enorm.")),
        *norm("hnorm.", one("hnorm.")),
        *linear("eh_proj.", one("eh_proj.")),
        *under("transformer_layer.", "", [*attention, *_experts(config)]),
        *norm("final_layernorm.", one("shared_head.norm.")),
    ]
    layers = range(config.mtp_num_layers or 0)
    return under("mtp.layers.*.", "model.layers.*.", layer, layers=layers, shift=config.num_layers)


REPEATED = ("model.layers.*.embed_tokens.weight", "model.layers.*.shared_head.head.weight")


def config_v2(hf: Config) -> DeepSeekV2Config:
    fields = read(hf, _LATENT, only=_ONLY_2)
    method = hf.get("topk_method", "greedy")
    if method == "group_limited_greedy":
        fields |= read(hf, _GROUPS)
    elif method == "greedy":
        fields |= {"moe_router_num_groups": None, "moe_router_group_topk": None}
    else:
        raise refusal(hf, "topk_method", "nemo2's DeepSeek V2 supports 'greedy' and 'group_limited_greedy'")
    return DeepSeekV2Config(**fields, **_others(hf, fields))


def hf_config_v2(ours: DeepSeekV2Config) -> dict[str, Any]:
    grouped = (ours.moe_router_num_groups or 1) > 1
    method = {"topk_method": "group_limited_greedy" if grouped else "greedy"}
    return said(ours, _written(ours, _ONLY_2) | method, config_v2)


def config_v3(hf: Config) -> DeepSeekV3Config:
    if hf.get("model_type") == "kimi_k2":
        hf = {**hf, "model_type": "deepseek_v3"}  # Kimi K2's name of the same class
    fields = read(hf, [*_LATENT, *_GROUPS], only=_ONLY_3)
    check_routing(hf, fields)
    further = hf.get("num_nextn_predict_layers", 0)
    return DeepSeekV3Config(**fields, **_others(hf, fields), mtp_num_layers=further or None)


def check_routing(hf: Config, fields: Config) -> None:
    """Check that Megatron-Core's router chooses and weights the same experts as the released model's router.

    The released router ranks groups by the sum of the best two scores of each, and divides the chosen experts' weights
    by their sum.

    Raises:
        ConfigError: the routers differ.
    """
    best, groups = fields["moe_router_topk"], fields["moe_router_group_topk"] or 1
    if best == 1:
        raise refusal(hf, "num_experts_per_tok", "nemo2's router doesn't normalize the weight of a single expert to 1")
    if (fields["moe_router_num_groups"] or 1) > 1 and best // groups != 2:
        raise refusal(
            hf,
            "num_experts_per_tok",
            f"with topk_group={groups}, nemo2's router ranks groups by the sum of their best {best // groups} scores, and the "
            "released model by the sum of their best 2",
        )


def hf_config_v3(ours: DeepSeekV3Config) -> dict[str, Any]:
    further = {"num_nextn_predict_layers": ours.mtp_num_layers or 0}
    return said(ours, _written(ours, _ONLY_3) | further, config_v3)


def _others(hf: Config, fields: Config) -> dict[str, Any]:
    """The settings that aren't a single field on both sides: the dense layers before the layers with experts, shared
    experts, and positions."""
    rope = rope_of(hf, kinds=("default", "yarn"))
    # Megatron-Core scales the scores by this factor even if positions aren't stretched.
    yarn: dict[str, Any] = {"rope_type": "rope", "rotary_scaling_factor": 1.0}
    if rope.kind == "yarn":
        yarn = {"rope_type": "yarn", **scaled(hf, rope, _YARN)}
    dense, layers = hf.get("first_k_dense_replace") or 0, fields["num_layers"]
    shared = (hf.get("n_shared_experts") or 0) * fields["moe_ffn_hidden_size"]
    return {
        **yarn,
        "rotary_base": rope.theta,
        "seq_length": yarn.get("original_max_position_embeddings", hf.get("max_position_embeddings", 2048)),
        "kv_channels": fields["qk_head_dim"],
        "moe_layer_freq": [int(layer >= dense) for layer in range(layers)],
        "moe_shared_expert_intermediate_size": shared or None,
        "moe_shared_expert_overlap": bool(shared),
    }


def _written(ours: DeepSeekConfig, only: Config) -> dict[str, Any]:
    experts_in = meaning(ours)["experts_in"] or []
    yarn = ours.rope_type == "yarn"
    scaling = {theirs: getattr(ours, name) for theirs, (name, _) in _YARN.items()} if yarn else {}
    return {
        **written(ours, [*_LATENT, *_GROUPS], only=only),
        "num_key_value_heads": ours.num_attention_heads,
        "first_k_dense_replace": experts_in.index(1) if 1 in experts_in else len(experts_in),
        "n_shared_experts": (ours.moe_shared_expert_intermediate_size or 0) // (ours.moe_ffn_hidden_size or 1),
        "max_position_embeddings": max(
            ours.seq_length, int(ours.original_max_position_embeddings * scaling.get("factor", 1))
        ),
        **rope_fields(ours.rotary_base, kind="yarn" if yarn else "default", **scaling),
    }


DEEPSEEK_V2 = Conversion(
    architectures=("DeepseekV2ForCausalLM",),
    model=DeepSeekModel,
    configs=(DeepSeekV2Config,),
    rows=rows,
    config=config_v2,
    hf_config=hf_config_v2,
)

DEEPSEEK_V3 = Conversion(
    architectures=("DeepseekV3ForCausalLM",),
    model=DeepSeekModel,
    configs=(DeepSeekV3Config,),
    rows=rows,
    config=config_v3,
    hf_config=hf_config_v3,
    ignored=REPEATED,
)
