# SPDX-License-Identifier: Apache-2.0
"""config.json and our configurations: the named ones come back as they were, and what either side can't be is refused."""

import dataclasses
import json
from importlib import import_module
from typing import Any

import pytest

from nemo2.base.errors import ConfigError
from nemo2.models.conversion.families import conversion_for, conversion_of, families
from nemo2.models.conversion.settings import differences
from support.families import named_sizes

# Not what a model computes: how it starts, how long its sequences are, which kernels it runs on.
ELSEWHERE = {
    "seq_length", "init_method", "output_layer_init_method", "embedding_init_method", "is_vision_language", "mamba_num_heads",
    "persist_layer_norm", "first_last_layers_bf16", "is_hybrid_model", "use_mamba_mem_eff_path",
}  # fmt: skip


def named() -> list[str]:
    """All configurations that have sizes."""
    return [size.replace(":", ".") for size in named_sizes()]


def made(name: str, **fields: Any) -> Any:
    module, kind = name.split(".")
    return getattr(import_module(f"nemo2.models.{module}"), kind)(**fields)


WITHOUT_SIZES = {"GraniteMoESharedConfig"}
"""Configurations of which no size has a name."""


def test_all_families_are_looked_at() -> None:
    looked_at = {type(made(name)) for name in named()}
    for family in families():
        for kind in family.configs:
            assert kind.__name__ in WITHOUT_SIZES or any(issubclass(one, kind) for one in looked_at), kind


@pytest.mark.parametrize("name", [name for name in named() if name != "gpt3.GPTConfig175B"])
def test_a_named_configuration_comes_back_through_config_json(name: str) -> None:
    ours = made(name, vocab_size=1000)
    family = conversion_of(ours)
    text = json.dumps(family.hf_config(ours) | {"architectures": list(family.architectures[:1])})
    back = conversion_for(json.loads(text)).config(json.loads(text))
    assert differences(ours, back) == {}
    elsewhere = ELSEWHERE | (
        {"ffn_hidden_size", "num_query_groups"} if hasattr(ours, "heterogeneous_block_specs") else set()
    )
    changed = {
        field.name: (getattr(ours, field.name), getattr(back, field.name, None))
        for field in dataclasses.fields(ours)
        if field.name not in elsewhere and getattr(ours, field.name) != getattr(back, field.name, None)
    }
    assert {name for name, (before, after) in changed.items() if before or after} <= {
        "moe_router_num_groups", "moe_router_group_topk",
    }  # fmt: skip


def test_a_configuration_without_a_vocabulary_is_told_too() -> None:
    ours = made("llama.Llama31Config8B")
    assert conversion_of(ours).hf_config(ours)["vocab_size"] is None


def test_a_family_with_two_conversions_is_exported_by_one_and_read_by_both() -> None:
    ours = made("chatglm.ChatGLM3Config6B")
    assert conversion_of(ours).architectures[0] == "GlmForCausalLM"
    assert conversion_of(ours, ["ChatGLMModel"]).architectures[0] == "ChatGLMModel"


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "rms_norm_eps": 1e-5,
}  # fmt: skip
SCALED = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def read(**fields: Any) -> Any:
    told = {**LLAMA, **fields}
    return conversion_for(told).config(told)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 500000.0, "rope_scaling": SCALED},
        {
            "rope_theta": 500000.0,
            "rope_scaling": {"type": "llama3", **{k: v for k, v in SCALED.items() if k != "rope_type"}},
        },
        {"rope_parameters": {"rope_theta": 500000.0, **SCALED}},
        {"rope_theta": 500000.0, "rope_scaling": SCALED, "rope_parameters": {"rope_theta": 500000.0, **SCALED}},
    ],
)
def test_both_spellings_of_rotary_positions_are_read(fields: Any) -> None:
    config = read(**fields)
    assert (config.rotary_base, config.scale_factor, config.old_context_len) == (500_000, 8.0, 8192)


def test_both_spellings_are_written() -> None:
    ours = made("llama.Llama32Config1B", vocab_size=128256)
    told = conversion_of(ours).hf_config(ours)
    assert told["rope_theta"] == told["rope_parameters"]["rope_theta"] == 500_000.0
    assert told["rope_scaling"] == {**SCALED, "factor": 32.0}
    assert told["rope_parameters"] == {**SCALED, "factor": 32.0, "rope_theta": 500_000.0}


_GATED = {"hidden_act": "silu", "attention_bias": False, "rms_norm_eps": 1e-6}
# What released config.json files say, in their notation, beyond what is a default of transformers' class.
RELEASED: dict[str, dict[str, Any]] = {
    "olmo3.OLMo3Config7B": {
        **_GATED, "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "vocab_size": 100278, "hidden_size": 4096,
        "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "max_position_embeddings": 65536, "rope_theta": 500000, "sliding_window": 4096,
        "layer_types": ([*["sliding_attention"] * 3, "full_attention"]) * 8,
        "rope_scaling": {"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
                         "original_max_position_embeddings": 8192, "rope_type": "yarn"},
    },
    "ministral3.Ministral3Config14B": {
        "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "vision_config": {},
        "text_config": {
            "model_type": "ministral3", "vocab_size": 131072, "hidden_size": 5120, "intermediate_size": 16384,
            "num_hidden_layers": 40, "num_attention_heads": 32, "sliding_window": None,
            "rope_parameters": {"type": "yarn", "rope_type": "yarn", "rope_theta": 1e9, "factor": 16.0, "beta_fast": 32.0,
                                "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
                                "original_max_position_embeddings": 16384, "max_position_embeddings": 262144},
        },
    },
    "hunyuan_moe.HunyuanConfig80B_A13B": {
        **_GATED, "architectures": ["HunYuanMoEV1ForCausalLM"], "model_type": "hunyuan_v1_moe", "vocab_size": 128167,
        "hidden_size": 4096, "intermediate_size": 3072, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 32768, "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "num_experts": 64, "moe_topk": [8] * 32, "num_shared_expert": [1] * 32,
        "moe_intermediate_size": [3072] * 32,
        "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
                         "mscale_all_dim": 1.0},
    },
    "hunyuan.HunyuanConfig7B": {
        **_GATED, "architectures": ["HunYuanDenseV1ForCausalLM"], "model_type": "hunyuan_v1_dense", "vocab_size": 128167,
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144, "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
                         "mscale_all_dim": 0.0},
    },
    "llama4.Llama4Experts16Config": {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "text_config": {
            "attention_bias": False, "attention_chunk_size": 8192, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
            "initializer_range": 0.02, "interleave_moe_layer_step": 1, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
            "max_position_embeddings": 10485760, "model_type": "llama4_text", "no_rope_layers": [1, 1, 1, 0] * 12,
            "num_attention_heads": 40, "num_experts_per_tok": 1, "num_hidden_layers": 48, "num_key_value_heads": 8,
            "num_local_experts": 16, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "use_qk_norm": True, "vocab_size": 202048,
            "rope_scaling": {"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "rope_type": "llama3",
                             "original_max_position_embeddings": 8192},
        }},
    "gemma3.Gemma3Config4B": {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        }},
    "deepseek.DeepSeekV2Config": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "attention_bias": False, "ep_size": 1,
        "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02,
        "intermediate_size": 12288, "kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_intermediate_size": 1536,
        "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 160, "n_shared_experts": 2, "norm_topk_prob": False,
        "num_attention_heads": 128, "num_experts_per_tok": 6, "num_hidden_layers": 60, "num_key_value_heads": 128,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6,
        "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
                         "original_max_position_embeddings": 4096, "type": "yarn"},
        "rope_theta": 10000, "routed_scaling_factor": 16.0, "scoring_func": "softmax", "tie_word_embeddings": False,
        "topk_group": 3, "topk_method": "group_limited_greedy", "v_head_dim": 128, "vocab_size": 102400
    },
    "phi3.Phi3ConfigMini": {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "attention_bias": False, "attention_dropout": 0.0,
        "embd_pdrop": 0.0, "hidden_act": "silu", "hidden_size": 3072, "initializer_range": 0.02, "intermediate_size": 8192,
        "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
        "original_max_position_embeddings": 4096, "resid_pdrop": 0.0, "rms_norm_eps": 1e-5, "rope_scaling": None,
        "rope_theta": 10000.0, "sliding_window": 2047, "tie_word_embeddings": False, "vocab_size": 32064
    },
    "starcoder2.Starcoder2Config7B": {
        "architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2", "attention_dropout": 0.0,
        "embedding_dropout": 0.0, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 4608, "initializer_range": 0.018042,
        "intermediate_size": 18432, "max_position_embeddings": 16384, "norm_epsilon": 1e-5, "num_attention_heads": 36,
        "num_hidden_layers": 32, "num_key_value_heads": 4, "residual_dropout": 0.0, "rope_theta": 1000000,
        "sliding_window": 4096, "use_bias": True, "vocab_size": 49152
    },
    "ssm.Nemotron3Nano30B_A3B": {
        "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "attention_bias": False, "head_dim": 128,
        "hidden_size": 2688, "intermediate_size": 1856, "mamba_head_dim": 64, "mamba_num_heads": 64, "mlp_hidden_act": "relu2",
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "layer_norm_epsilon": 1e-5,
        "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "n_group": 1, "n_groups": 8,
        "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 32,
        "num_experts_per_tok": 6, "num_hidden_layers": 52, "num_key_value_heads": 2, "routed_scaling_factor": 2.5,
        "ssm_state_size": 128, "tie_word_embeddings": False, "topk_group": 1, "vocab_size": 131072,
    },
    "granite_moe.Granite3Config1B_A400M": {
        "architectures": ["GraniteMoeForCausalLM"], "attention_multiplier": 0.015625, "embedding_multiplier": 12.0,
        "hidden_size": 1024, "intermediate_size": 512, "logits_scaling": 6.0, "max_position_embeddings": 4096,
        "num_attention_heads": 16, "num_experts_per_tok": 8, "num_hidden_layers": 24, "num_key_value_heads": 8,
        "num_local_experts": 32, "residual_multiplier": 0.22, "rms_norm_eps": 1e-06, "rope_theta": 10000,
        "tie_word_embeddings": True, "vocab_size": 49152,
    },
    "llama.CodeLlamaConfig70B": {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 8192, "intermediate_size": 28672,
        "max_position_embeddings": 16384, "num_attention_heads": 64, "num_hidden_layers": 80, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 1000000, "tie_word_embeddings": False, "vocab_size": 32016,
    },
    "hunyuan.HunyuanConfig4B": {
        "architectures": ["HunYuanDenseV1ForCausalLM"], "hidden_size": 3072, "intermediate_size": 8192, "head_dim": 128,
        "max_position_embeddings": 262144, "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
        "tie_word_embeddings": True, "vocab_size": 120818,
    },
    "starcoder.StarcoderConfig15B": {
        "architectures": ["GPTBigCodeForCausalLM"], "activation_function": "gelu", "attn_pdrop": 0.1, "embd_pdrop": 0.1,
        "layer_norm_epsilon": 1e-05, "multi_query": True, "n_embd": 6144, "n_head": 48, "n_inner": 24576, "n_layer": 40,
        "n_positions": 8192, "resid_pdrop": 0.1, "vocab_size": 49152,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", RELEASED)
def test_a_released_config_json_is_our_named_configuration(name: str) -> None:
    found = conversion_for(RELEASED[name]).config(RELEASED[name])
    assert differences(made(name, vocab_size=found.vocab_size), found) == {}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu': .*'silu'"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "has no factor"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "alpha": 3.0}}, "nemo2 has no setting for alpha"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "rope_parameters=.*'longrope'.* not 'proportional'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "has no short_factor"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0] * 8}},
         "short_factors has 1 numbers: heads with 16 rotated channels need 8"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0.5}}, "factor=0.5: .* factor must be finite and at least 1"),
        ({"architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2",
          "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling=.*'yarn'"),
        ({"rope_scaling": {**SCALED, "attention_factor": 2.0}}, "nemo2 has no setting for attention_factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "has no low_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"hidden_size": None}, "no hidden_size"),
        ({"architectures": ["BaichuanForCausalLM"], "model_type": "baichuan"}, "13B, whose ALiBi"),
        ({"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "rope_scaling": {"type": "dynamic"}}, "'dynamic'"),
        ({"architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "num_heads": 8, "n_groups": 8}, "n_groups=8"),
        ({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": True, "layer_types": ["x"] * 4,
          "sliding_window": 8}, "layer_types="),
        ({"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "attn_logit_softcapping": 5.0},
         "attn_logit_softcapping=5.0"),
        ({"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "n_routed_experts": 8, "n_group": 2,
          "moe_intermediate_size": 8, "num_experts_per_tok": 4, "topk_group": 1, "rms_norm_eps": 1e-6},
         "num_experts_per_tok=4: with topk_group=1, .* best 4 scores, and the released model by the sum of their best 2"),
        ({"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "n_routed_experts": 8, "n_group": 1,
          "moe_intermediate_size": 8, "num_experts_per_tok": 1, "topk_group": 1, "rms_norm_eps": 1e-6},
         "num_experts_per_tok=1: .* a single expert"),
        ({"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "layer_types": ["sliding_attention"] * 4},
         "layer_types=.* use_sliding_window"),
        ({"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "use_sliding_window": True},
         "use_sliding_window=True: .* False"),
        ({"architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv=8.0: .* None"),
        ({"architectures": ["CohereForCausalLM"], "model_type": "cohere", "use_qk_norm": True}, "use_qk_norm=True: .* False"),
        ({"architectures": ["GraniteMoeForCausalLM"], "model_type": "granitemoe", "attention_bias": True},
         "attention_bias=True: .* False"),
        ({"architectures": ["HunYuanMoEV1ForCausalLM"], "model_type": "hunyuan_v1_moe", "moe_topk": [8, 8, 4, 8]},
         "moe_topk=.* the same in every layer"),
        ({"architectures": ["HunYuanMoEV1ForCausalLM"], "model_type": "hunyuan_v1_moe", "num_shared_expert": [2] * 4},
         "num_shared_expert=.* one shared expert"),
        ({"architectures": ["HunYuanMoEV1ForCausalLM"], "model_type": "hunyuan_v1_moe", "moe_intermediate_size": [32] * 4},
         "moe_intermediate_size=.* intermediate_size"),
        ({"architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe", "use_bias": True}, "use_bias=True"),
        ({"architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe", "moe_layer_start_index": 4},
         "moe_layer_start_index=4"),
        ({"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3",
          "rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
         "rope_parameters=.* one rotary base"),
        ({"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3",
          "rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_parameters=.*llama_4_scaling_beta"),
        ({"architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hybrid_override_pattern": "M-MG"},
         "hybrid_override_pattern='M-MG'"),
        ({"architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hybrid_override_pattern": "M-ME",
          "moe_latent_size": 32}, "moe_latent_size=32"),
        ({"architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hybrid_override_pattern": "M-ME",
          "norm_topk_prob": False}, "norm_topk_prob=False"),
    ],
)  # fmt: skip
def test_what_our_model_can_t_be_is_refused_by_field_and_value(fields: Any, words: str) -> None:
    if "layer_types" in fields:
        fields = fields | {"layer_types": ["x", "sliding_attention"] * 2}
    with pytest.raises(ConfigError, match=words):
        read(**fields)


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("llama.Llama3Config8B", {"window_size": (127, 0)}, r"window=\[128.*it would become \[None"),
        ("mistral.MistralConfig7B", {"add_qkv_bias": True}, r"add_qkv_bias=True \(it would become False\)"),
        ("baichuan.Baichuan2Config7B", {"kv_channels": 64}, "kv_channels=64"),
        ("gpt3.GPTConfig175B", {}, "layernorm_zero_centered_gamma=True"),
        ("starcoder2.Starcoder2Config3B", {"bias_activation_fusion": False}, "activation_func='GELU'"),
        ("baichuan.Baichuan2Config7B", {"normalize_output_layer": False}, "normalize_output_layer=False"),
        ("deepseek.DeepSeekV2Config", {"moe_router_group_score": "sum"}, "moe_router_group_score='sum'"),
    ],
)
def test_what_hugging_face_s_model_can_t_be_is_refused(name: str, fields: Any, words: str) -> None:
    ours = made(name, **fields)
    with pytest.raises(ConfigError, match=words):
        conversion_of(ours).hf_config(ours)


def exported_after_the_backend_came() -> str:
    from nemo2.base.backend import get_backend

    early = made("ssm.NemotronHConfig8B")
    compiled = early.activation_func
    get_backend().install()
    config = made("ssm.NemotronHConfig8B")
    assert config.activation_func is not compiled, "nothing was compiled: this test shows nothing"
    early.adjust_to_this_machine()
    assert early.activation_func is config.activation_func, "its model would build C++ in each process"
    return conversion_of(config).hf_config(config)["mlp_hidden_act"]


def test_an_activation_has_its_name_whenever_the_backend_of_cpus_came(run_on_ranks: Any) -> None:
    """A command may import the tables first: Megatron-Core's functions are compiled until that backend is installed."""
    assert run_on_ranks(exported_after_the_backend_came, 1) == ["relu2"]
