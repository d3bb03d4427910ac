# SPDX-License-Identifier: Apache-2.0
"""A shrunken version of every family trains, and its tensor-parallel halves train as the whole does."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

SEQ, VOCAB, STEPS = 32, 96, 5
SMALL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "kv_channels": 8,
    "seq_length": SEQ,
    "vocab_size": VOCAB,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
EXPERTS: dict[str, Any] = {"num_moe_experts": 4, "moe_router_dtype": None}
LATENT: dict[str, Any] = {
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "moe_ffn_hidden_size": 16,
    "moe_shared_expert_intermediate_size": 16,
}
# What each family has beyond the Llama stays as in its own config; only sizes shrink.
SHRUNK: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama 2": ("llama", "Llama2Config7B", {"num_query_groups": 4}),
    "Llama 3": ("llama", "Llama3Config8B", {"num_query_groups": 2}),
    "Llama 3.2": ("llama", "Llama32Config1B", {"num_query_groups": 2, "old_context_len": 16}),
    "Llama 3.1": ("llama", "Llama31Config8B", {"num_query_groups": 2, "old_context_len": 16}),
    "Llama 4": ("llama4", "Llama4Experts16Config", {
        "num_layers": 4, "num_query_groups": 2, "moe_ffn_hidden_size": 16, "moe_shared_expert_intermediate_size": 16,
        "attention_chunk_size": 8, **EXPERTS,
    }),
    "Llama-Nemotron": ("llama_nemotron", "Llama33NemotronSuper49BConfig", {
        "num_layers": 3, "num_query_groups": 2,
        "heterogeneous_layers_config_encoded_json": '{"block_configs": ['
        '{"attention": {"num_query_groups": 4}, "mlp": {"ffn_hidden_size": 32}},'
        '{"attention": {"no_op": true, "num_query_groups": null}, "mlp": {"ffn_hidden_size": 64}},'
        '{"attention": {"num_query_groups": 2}, "mlp": {"no_op": true, "ffn_hidden_size": null}}]}',
    }),
    "Mistral": ("mistral", "MistralConfig7B", {"num_query_groups": 2, "window_size": (7, 0)}),
    "Mistral-NeMo": ("mistral", "MistralNeMoConfig12B", {"num_query_groups": 2}),
    "Mixtral": ("mixtral", "MixtralConfig8x7B", {"num_query_groups": 2, "moe_router_topk": 2, **EXPERTS}),
    "Qwen 2": ("qwen2", "Qwen2Config500M", {"num_query_groups": 2}),
    "Qwen 2.5": ("qwen2", "Qwen25Config500M", {"num_query_groups": 2}),
    "Qwen 3": ("qwen3", "Qwen3Config600M", {"num_query_groups": 2}),
    "Qwen 3 MoE": ("qwen3", "Qwen3Config30B_A3B", {
        "num_query_groups": 2, "moe_ffn_hidden_size": 16, "moe_router_topk": 2, **EXPERTS,
    }),
    "Gemma": ("gemma", "GemmaConfig2B", {"num_query_groups": 2}),
    "Gemma 2": ("gemma2", "Gemma2Config2B", {"num_query_groups": 2, "window_size": (7, 0)}),
    "Gemma 3": ("gemma3", "Gemma3Config4B", {"num_layers": 3, "num_query_groups": 2, "window_size": 8,
                                             "interleaved_attn_pattern": (2, 1)}),
    # Before V2-Lite: Megatron-Core keeps one table of auxiliary losses per process, as long as its first model.
    "DeepSeek V3": ("deepseek", "DeepSeekV3Config", {
        **LATENT, "moe_layer_freq": [0, 1], "moe_router_topk": 2, "moe_router_num_groups": 2,
        "moe_router_group_topk": 1, "mtp_num_layers": 1, **EXPERTS, "moe_router_dtype": "fp32",
    }),
    "DeepSeek V2-Lite": ("deepseek", "DeepSeekV2LiteConfig", {
        **LATENT, "q_lora_rank": None, "moe_layer_freq": [0, 1], "moe_router_topk": 2, **EXPERTS,
    }),
    "DeepSeek V2": ("deepseek", "DeepSeekV2Config", {
        **LATENT, "moe_layer_freq": [0, 1], "moe_router_topk": 2, "moe_router_num_groups": 2, "moe_router_group_topk": 1,
        **EXPERTS,
    }),
    "Nemotron 3": ("nemotron", "Nemotron3Config4B", {"num_query_groups": 2}),
    "Nemotron 4": ("nemotron", "Nemotron4Config15B", {"num_query_groups": 2}),
    "GPT-3": ("gpt3", "GPTConfig175B", {}),
    "GPT-OSS": ("gpt_oss", "GPTOSSConfig20B", {
        "num_query_groups": 2, "moe_ffn_hidden_size": 16, "moe_router_topk": 2, "window_size": (7, 0), **EXPERTS,
    }),
    "Phi-3": ("phi3", "Phi3ConfigMini", {"num_query_groups": 4}),
    "StarCoder": ("starcoder", "StarcoderConfig15B", {}),
    "StarCoder 2": ("starcoder", "Starcoder2Config3B", {"num_query_groups": 2}),
    "Baichuan 2": ("baichuan", "Baichuan2Config7B", {"num_query_groups": 4}),
    "ChatGLM": ("chatglm", "ChatGLM3Config6B", {"num_query_groups": 2}),
    "Mamba 2": ("ssm", "BaseMambaConfig130M", {
        "hybrid_override_pattern": "MM", "mamba_num_groups": 2, "mamba_head_dim": 8, "mamba_state_dim": 16,
    }),
    "Nemotron-H": ("ssm", "NemotronHConfig8B", {
        "num_layers": 4, "hybrid_override_pattern": "M-M*", "num_query_groups": 2, "mamba_num_groups": 2,
        "mamba_head_dim": 8, "mamba_state_dim": 16,
    }),
    "Nemotron Nano v2": ("ssm", "NemotronNano9Bv2", {
        "num_layers": 4, "hybrid_override_pattern": "M-M*", "num_query_groups": 2, "mamba_num_groups": 2,
        "mamba_head_dim": 8, "mamba_state_dim": 16,
    }),
}  # fmt: skip

# Whole experts, shared out over the tensor-parallel ranks, instead of a slice of each; biases allow nothing else.
WHOLE_EXPERTS = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
SHARED_OUT = ("GPT-OSS", "Qwen 3 MoE")


def shrunk(family: str, **layout: Any) -> Any:
    module, name, fields = SHRUNK[family]
    return getattr(import_module(f"nemo2.models.{module}"), name)(**{**SMALL, **fields, **layout})


def train_each(families: list[str], tp: int, directory: str) -> dict[str, Any]:
    """Losses of some steps on one batch, by family; two ranks start from the weights that one rank started from."""
    from megatron.core import parallel_state, tensor_parallel

    import bench.bare_megatron as bare

    # Experts and latent attention need sequence parallelism with tensor parallelism; to the others it must not matter.
    settings = bare.Settings(vocab=VOCAB, seq=SEQ, mbs=2, gbs=4, steps=STEPS, tp=tp, sequence_parallel=tp > 1, lr=5e-3)
    batch = bare.random_batches(settings)(0)
    results = {}
    for family in families:
        layout: dict[str, Any] = {"tensor_model_parallel_size": tp}
        if tp > 1 and family in SHARED_OUT:
            layout |= WHOLE_EXPERTS

        def start_parallel(settings: Any, layout: dict[str, Any] = layout) -> None:
            parallel_state.destroy_model_parallel()
            parallel_state.initialize_model_parallel(**layout)
            torch.manual_seed(settings.seed)
            tensor_parallel.model_parallel_cuda_manual_seed(settings.seed)

        def build(pre: bool, post: bool, vp: int | None, family: str = family, layout: Any = layout) -> Any:
            config = shrunk(family, sequence_parallel=tp > 1, **layout)
            return config.configure_model(None, pre, post, vp)

        bare.start_parallel = start_parallel  # the bare loop's own knows no experts
        weights = str(Path(directory) / family.replace(" ", "_"))
        where: dict[str, Any] = {"save_weights_to": weights} if tp == 1 else {"load_weights_from": weights}
        results[family] = bare.train(settings, lambda step: batch, build_model=build, **where)["losses"]
    return results


def test_every_family_trains_and_its_tensor_parallel_halves_train_as_the_whole(
    run_on_ranks: Any, tmp_path: Path
) -> None:
    (whole,) = run_on_ranks(train_each, 1, list(SHRUNK), 1, str(tmp_path))
    halves, _ = run_on_ranks(train_each, 2, list(SHRUNK), 2, str(tmp_path))
    for family, losses in whole.items():
        assert losses[-1] < losses[0], family
        assert halves[family] == pytest.approx(losses, rel=2e-4), family
