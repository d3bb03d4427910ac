# SPDX-License-Identifier: Apache-2.0
"""Small models that together use every kind of layer, for tests in one process and in many."""

import dataclasses
from typing import Any

from nemo2.llm.fn import openai_gelu, quick_gelu

SIZES: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 4, "groups": 2, "ffn": 48, "vocab": 64, "seq": 16}

EXPERTS = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 24,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "alltoall",
    "moe_aux_loss_coeff": 1e-2,
}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": EXPERTS | {"moe_grouped_gemm": True, "moe_z_loss_coeff": 1e-3},
    "deepseek": EXPERTS
    | {
        "multi_latent_attention": True,
        "num_query_groups": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 6,
        "qk_layernorm": True,
        "rope_type": "yarn",
        "original_max_position_embeddings": 8,
        "rotary_scaling_factor": 4.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
        "moe_layer_freq": [0, 1],
        "moe_shared_expert_intermediate_size": 16,
        "moe_router_score_function": "sigmoid",
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
        "moe_router_enable_expert_bias": True,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_dtype": "fp32",
    },
    "gemma": {
        "post_sublayer_layernorm": True,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "window_size": (5, 0),
        "window_attn_skip_freq": 2,
        "qk_layernorm": True,
        "layernorm_zero_centered_gamma": True,
        "activation_func": openai_gelu,
        "bias_activation_fusion": False,
    },
    "gpt_oss": EXPERTS
    | {
        "moe_grouped_gemm": True,
        "softmax_type": "learnable",
        "window_size": (5, 0),
        "window_attn_skip_freq": 2,
        "add_bias_linear": True,
        "activation_func": quick_gelu,
        "activation_func_clamp_value": 0.5,
        "glu_linear_offset": 1.0,
        "bias_activation_fusion": False,
    },
}

# Without a formula in plain_decoder: the second prediction is checked across layouts only.
ALL_MODELS = MODELS | {"mtp": {"mtp_num_layers": 1}}


def build(model: str, settings: Any, layout: dict[str, Any], pre: bool, post: bool, vp_stage: int | None) -> Any:
    """A chunk of `model`; what TransformerConfig does not know is set on it, as GPTConfig has it."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    from nemo2.base.backend.compilation import as_megatron_has_it
    from nemo2.models.layers.logits import cap_logits
    from nemo2.models.layers.spec import layer_spec, mtp_block_spec
    from support.bare_megatron import transformer_config

    kind = MLATransformerConfig if ALL_MODELS[model].get("multi_latent_attention") else TransformerConfig
    base = transformer_config(settings)
    fields = {field.name: getattr(base, field.name) for field in dataclasses.fields(base) if field.init}
    fields |= dict.fromkeys(("init_method", "output_layer_init_method", "embedding_init_method"))
    fields |= {"expert_model_parallel_size": layout.get("ep", 1), "expert_tensor_parallel_size": layout.get("etp")}
    fields |= ALL_MODELS[model] | layout.get("config", {})
    fields["activation_func"] = as_megatron_has_it(fields["activation_func"])
    known = {field.name for field in dataclasses.fields(kind)}
    config: Any = kind(**{name: value for name, value in fields.items() if name in known})
    for name in fields.keys() - known:
        setattr(config, name, fields[name])
    layers = layer_spec(config, vp_stage=vp_stage)
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=settings.vocab,
        max_sequence_length=settings.seq,
        pre_process=pre,
        post_process=post,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        mtp_block_spec=mtp_block_spec(config, layers, vp_stage=vp_stage),
        vp_stage=vp_stage,
    )
    if post and getattr(config, "final_logit_softcapping", None):
        cap_logits(chunk.output_layer, config.final_logit_softcapping)
    return chunk
