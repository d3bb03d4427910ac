# SPDX-License-Identifier: Apache-2.0
"""Tiny random transformers models, saved like releases, and nemo2's models of them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from support import small_runs

_SIZES: dict[str, Any] = {
    "vocab_size": small_runs.VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": small_runs.SEQ,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "topk_method": "greedy",
}
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "gpt2": ("GPT2", {"tie_word_embeddings": True, "activation_function": "gelu_new"}),
    "starcoder": (
        "GPTBigCode",
        {"multi_query": False, "n_inner": 48, "tie_word_embeddings": True, "activation_function": "gelu"},
    ),
    "qwen2": ("Qwen2", {}),
    "mixtral": ("Mixtral", {}),
    "phi3": ("Phi3", {}),
    "nemotron": ("Nemotron", {}),
    "deepseek": ("DeepseekV2", _LATENT | {"first_k_dense_replace": 2}),
    "glm4 moe": (
        "Glm4Moe",
        {
            "head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "num_mtp_layers": 0,
        },
    ),
    "qwen2 moe": (
        "Qwen2Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
            "mlp_only_layers": [0],
        },
    ),
    "qwen3.5": (
        "Qwen3_5Text",
        {
            "head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "deepseek with experts": ("DeepseekV2", _LATENT | {"first_k_dense_replace": 1}),
}


def released(directory: str, family: str) -> str:
    """The folder of a release, made once. Biases and norms also have random values."""
    import torch
    import transformers

    folder = f"{directory}/release of {family}"
    if Path(folder).is_dir():
        return folder
    name, changes = _FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**(_SIZES | changes))
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def model_of(folder: str, *, rate: float, **changes: Any) -> Any:
    """nemo2's model of a release, with Adam at a constant rate, and without decay and clipping. ``changes``: changes to
    its configuration."""
    from megatron.core.optimizer import OptimizerConfig

    from nemo2.mcore.optim.megatron import MegatronOptimizerModule
    from nemo2.models.conversion.families import conversion_for

    said = json.loads((Path(folder) / "config.json").read_text())
    conversion = conversion_for(said)
    optimizer = OptimizerConfig(
        optimizer="adam", lr=rate, weight_decay=0.0, adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8, clip_grad=0.0
    )
    config = conversion.config(said)
    return conversion.model(
        dataclasses.replace(config, **changes) if changes else config, optim=MegatronOptimizerModule(optimizer)
    )
