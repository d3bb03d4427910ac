# SPDX-License-Identifier: Apache-2.0
"""Tiny transformers models for each family. Every switch that released models use is on in some row.

If transformers has no class for a release, a class that computes the same stands in, with its tensors renamed as in the
release.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from torch import Tensor

VOCABULARY, LENGTH, HIDDEN = 128, 40, 64
EXPERT_RANKS = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}

# What a transformers configuration of each spelling needs.
_LLAMA = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.02,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_COHERE = {**_LLAMA, "layer_norm_eps": 1e-5}
_GPT2 = {
    "vocab_size": VOCABULARY, "n_embd": HIDDEN, "n_inner": 96, "n_layer": 4, "n_head": 4, "n_positions": 64,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 4, "first_k_dense_replace": 1, "n_routed_experts": 8, "n_shared_experts": 2,
    "num_experts_per_tok": 4, "moe_intermediate_size": 32, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "routed_scaling_factor": 2.5,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.707,
        "mscale_all_dim": 0.707, "original_max_position_embeddings": 16,
    },
}  # fmt: skip
_LLAMA4 = {
    "head_dim": 16, "intermediate_size": 32, "intermediate_size_mlp": 96, "num_local_experts": 4, "num_experts_per_tok": 1,
    "attention_chunk_size": 16, "floor_scale": 12, "no_rope_layer_interval": 4,
}  # fmt: skip
_HYBRID = {
    "head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "expand": 2,
    "chunk_size": 16,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp", "linear_attention"],
}  # fmt: skip
_LINEAR = {
    "head_dim": 24, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 12,
    "linear_value_head_dim": 20, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}  # fmt: skip
_ROUTED = {
    "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention", "moe", "mlp"],
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 48,
    "routed_scaling_factor": 2.5,
}  # fmt: skip
_EIGHT_FOLD = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the table: one tiny model."""

    name: str
    config: str
    """transformers' configuration class."""
    fields: dict[str, Any]
    switches: str
    """The features of the model, for a reader."""
    layouts: tuple[str, ...] = ("TP 2, SP", "PP 2")
    with_tp: dict[str, Any] = field(default_factory=dict)
    """Sizes that the model needs in addition to a tensor-parallel size of 2."""
    released: Optional[Callable[[dict[str, Tensor], dict[str, Any]], tuple[dict[str, Tensor], dict[str, Any]]]] = None
    """A function that converts a stand-in's tensors and config.json to those of the release."""
    readable: bool = True
    """Whether transformers has a class that reads what is exported."""
    built_as: Optional[Callable[[Any], None]] = None
    """Changes a stand-in's layers to those of the release, before they are written."""
    computes_as: Optional[Callable[[Any], None]] = None
    """Makes a stand-in compute what the release does, after it is written."""
    trained: bool = False
    """Whether its training is compared with transformers', not only what it computes: a model with layers of its own, or one
    of each kind."""
    repeats: bool = False
    """Whether other rows take all its lines and branches of nemo2 (`sys.monitoring` says so), one of them of its family, and it
    has no number of its own: it runs by night."""
    like_another: bool = False
    """Whether it differs from another row only in what tensor-parallel ranks don't split: positions, sizes, the form of files."""


_EXPERTS = ("TP 2, SP", "PP 2", "EP 2")
_FOUR_FOLD = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}


def _per_channel(channels: int) -> dict[str, Any]:
    """LongRoPE's factors of half as many frequencies, as different from each other as the releases'."""
    return {
        "rope_type": "longrope", "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.05 * channel for channel in range(channels // 2)],
        "long_factor": [1.5 + 0.9 * channel for channel in range(channels // 2)],
    }  # fmt: skip


def _row(name: str, config: str, switches: str, base: dict[str, Any] = _LLAMA, **fields: Any) -> Row:
    own = {key: fields.pop(key) for key in Row.__dataclass_fields__ if key in fields}
    return Row(name=name, config=config, switches=switches, fields={**base, **fields}, **own)


def _as_baichuan(tensors: dict[str, Tensor], config: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    return _fused(tensors, "W_pack"), {**config, "architectures": ["BaichuanForCausalLM"], "model_type": "baichuan"}


def _fused(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """Queries, keys and values as one tensor."""
    found = {key: tensor for key, tensor in tensors.items() if not any(f".{x}_proj." in key for x in "qkv")}
    for key in tensors:
        if ".q_proj." in key:
            parts = [tensors[key.replace("q_proj", f"{x}_proj")] for x in "qkv"]
            found[key.replace("q_proj", name)] = torch.cat(parts)
    return found


def _as_chatglm(tensors: dict[str, Tensor], config: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    names = {
        "model.embed_tokens": "transformer.embedding.word_embeddings", "model.layers": "transformer.encoder.layers",
        "model.norm": "transformer.encoder.final_layernorm", "lm_head": "transformer.output_layer",
        "self_attn.query_key_value": "self_attention.query_key_value", "self_attn.o_proj": "self_attention.dense",
        "mlp.gate_up_proj": "mlp.dense_h_to_4h", "mlp.down_proj": "mlp.dense_4h_to_h",
    }  # fmt: skip
    found = {}
    for key, tensor in _fused(tensors, "query_key_value").items():
        for ours, theirs in names.items():
            key = key.replace(ours, theirs)
        found[key] = tensor
    told = {
        "architectures": ["ChatGLMModel"], "model_type": "chatglm", "padded_vocab_size": VOCABULARY, "num_layers": 4,
        "hidden_size": HIDDEN, "ffn_hidden_size": 96, "num_attention_heads": 4, "multi_query_group_num": 2,
        "kv_channels": 16, "seq_length": 64, "layernorm_epsilon": config["rms_norm_eps"], "add_qkv_bias": True,
        "rope_ratio": 50, "multi_query_attention": True, "rmsnorm": True, "tie_word_embeddings": False,
    }  # fmt: skip
    return found, told


# Widths of a block's feed-forward: Megatron-Core rounds them up to multiples of 256.
_BLOCKS = [(True, 6.0), (False, 12.0), (True, None), (True, 12.0)]


def _width(mult: float) -> int:
    return -(-int(2 * mult * HIDDEN / 3) // 256) * 256


def _as_pruned(tensors: dict[str, Tensor], config: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    gone = []
    for layer, (attention, mult) in enumerate(_BLOCKS):
        gone += [] if attention else [f"layers.{layer}.self_attn.", f"layers.{layer}.input_layernorm."]
        gone += [] if mult else [f"layers.{layer}.mlp.", f"layers.{layer}.post_attention_layernorm."]
    blocks = [
        {
            "attention": {"n_heads_in_group": 2 if attention else None, "no_op": not attention, "replace_with_linear": False},
            "ffn": {"ffn_mult": mult, "no_op": mult is None, "replace_with_linear": False},
        }
        for attention, mult in _BLOCKS
    ]  # fmt: skip
    found = {key: tensor for key, tensor in tensors.items() if not any(name in key for name in gone)}
    told = {**config, "architectures": ["DeciLMForCausalLM"], "model_type": "nemotron-nas", "block_configs": blocks}
    return found, told


def _prune(model: Any) -> None:
    for layer, (_, mult) in zip(model.model.layers, _BLOCKS, strict=True):
        config = copy.copy(model.config)
        config.intermediate_size = _width(mult) if mult else 1
        layer.mlp = type(layer.mlp)(config)


def _switch_off(model: Any) -> None:
    for layer, (attention, mult) in zip(model.model.layers, _BLOCKS, strict=True):
        if not attention:
            layer.self_attn.o_proj.weight.data.zero_()
        if not mult:
            layer.mlp.down_proj.weight.data.zero_()


def _with_further_prediction(tensors: dict[str, Tensor], config: dict[str, Any]) -> Any:
    """Add the release's further layer behind the last one: a copy of the last layer, with three norms and a projection
    in front."""
    found, layers, generator = dict(tensors), config["num_hidden_layers"], torch.Generator().manual_seed(11)
    for key, tensor in tensors.items():
        if f"layers.{layers - 1}." in key:
            found[key.replace(f"layers.{layers - 1}.", f"layers.{layers}.")] = torch.randn(
                tensor.shape, generator=generator
            )
    for name, shape in {
        "enorm": (HIDDEN,),
        "hnorm": (HIDDEN,),
        "eh_proj": (HIDDEN, 2 * HIDDEN),
        "shared_head.norm": (HIDDEN,),
    }.items():
        found[f"model.layers.{layers}.{name}.weight"] = torch.randn(shape, generator=generator)
    return found, {**config, "num_nextn_predict_layers": 1}


def _normalise_rows(model: Any) -> None:
    model.lm_head.weight.data = torch.nn.functional.normalize(model.lm_head.weight.data)


def _forget_slowly(model: Any) -> None:
    """Decays near 1 per token. Those of random weights are as low as exp(-20), and their running sums cost fp32 two digits."""
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data -= 4.0


def _with_stacked_experts(
    tensors: dict[str, Tensor], config: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The text model of a file with a vision model, which has one tensor for all experts."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(config["num_hidden_layers"] if tensors else 0):
        name = f"model.layers.{layer}.mlp.experts."
        experts = [
            {part: tensors[f"{name}{expert}.{part}_proj.weight"] for part in ("gate", "up", "down")}
            for expert in range(config["num_experts"])
        ]
        found[f"{name}gate_up_proj"] = torch.stack([torch.cat([one["gate"], one["up"]]) for one in experts])
        found[f"{name}down_proj"] = torch.stack([one["down"] for one in experts])
    return found, {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": config,
    }


_SLOWLY: dict[str, Any] = {"built_as": _forget_slowly}
_SHARED: dict[str, Any] = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}
_OF_EXPERTS = {name: value for name, value in _LLAMA.items() if name != "intermediate_size"}

ROWS: tuple[Row, ...] = (
    _row("Llama 2", "LlamaConfig", "multi-head attention", num_key_value_heads=4),
    _row("Llama 3, Code Llama", "LlamaConfig", "grouped queries, rotary base 500,000, explicit head width",
         head_dim=32, rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
         like_another=True, repeats=True),
    _row("Llama 3.1, Nemotron Nano and 70B", "LlamaConfig", "rotary scaling `llama3`", rope_parameters=_EIGHT_FOLD,
         trained=True),
    _row("Llama 3.2", "LlamaConfig", "rotary scaling `llama3` with factor 32, tied embedding", tie_word_embeddings=True,
         rope_parameters=_EIGHT_FOLD | {"factor": 32.0}, repeats=True),
    _row("Llama, linear scaling", "LlamaConfig", "rotary scaling `linear`, biases in all linear layers", attention_bias=True,
         mlp_bias=True, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
         like_another=True, repeats=True),
    _row("Llama, dynamic scaling", "LlamaConfig", "rotary scaling `dynamic`, beyond the original length",
         max_position_embeddings=24, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}),
    _row("Llama 4 Scout", "Llama4TextConfig", "chunked attention, layers without positions, rotary scaling `llama3`, "
         "attention temperature, QK norm, a shared expert", _LLAMA | _LLAMA4, layouts=_EXPERTS,
         rope_parameters=_EIGHT_FOLD | {"factor": 16.0, "high_freq_factor": 1.0}),
    _row("Llama 4 Maverick", "Llama4TextConfig", "experts in every other layer, no rotary scaling", _LLAMA | _LLAMA4,
         layouts=_EXPERTS, interleave_moe_layer_step=2, use_qk_norm=False, attn_temperature_tuning=False,
         rope_parameters={"rope_type": "default", "rope_theta": 500000.0}),
    _row("Llama-Nemotron Super, Ultra (by a Llama)", "LlamaConfig", "blocks with individual widths, without attention, or "
         "without feed-forward", rope_parameters=_EIGHT_FOLD, released=_as_pruned, readable=False, built_as=_prune,
         computes_as=_switch_off,
         like_another=True),
    _row("Mistral 7B", "MistralConfig", "sliding window in all layers", sliding_window=8, like_another=True),
    _row("Mistral NeMo, Large", "MistralConfig", "explicit head width", sliding_window=None, head_dim=32,
         like_another=True, repeats=True),
    _row("Mixtral", "MixtralConfig", "experts, sliding window", num_local_experts=4, num_experts_per_tok=2, sliding_window=16,
         layouts=_EXPERTS),
    _row("Qwen 2, 2.5", "Qwen2Config", "QKV biases", repeats=True),
    _row("Qwen 2, 2.5, small", "Qwen2Config", "tied embedding, sliding window from the third layer, explicit head width",
         tie_word_embeddings=True, use_sliding_window=True, sliding_window=8, max_window_layers=2, head_dim=32,
         like_another=True),
    _row("Qwen 3", "Qwen3Config", "QK norm, explicit head width", head_dim=32),
    _row("Qwen 3, small", "Qwen3Config", "tied embedding", head_dim=16, tie_word_embeddings=True, repeats=True),
    _row("Qwen 3, stretched", "Qwen3Config", "rotary scaling `yarn`", head_dim=32, rope_parameters=_FOUR_FOLD,
         like_another=True, repeats=True),
    _row("Qwen 3 MoE", "Qwen3MoeConfig", "expert weights renormalized", head_dim=32, num_experts=8, norm_topk_prob=True,
         num_experts_per_tok=4, moe_intermediate_size=32, layouts=_EXPERTS,
         trained=True),
    _row("Qwen 3 MoE, mixed", "Qwen3MoeConfig", "some dense layers, expert weights not renormalized", head_dim=32,
         num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, mlp_only_layers=[0, 2], layouts=_EXPERTS,
         like_another=True),
    _row("Qwen 3 MoE, window", "Qwen3MoeConfig", "sliding window in all layers, tied embedding", head_dim=16,
         num_experts=4, num_experts_per_tok=2, norm_topk_prob=True, moe_intermediate_size=32,
         use_sliding_window=True, sliding_window=8, max_window_layers=2,
         tie_word_embeddings=True, layouts=("TP 2, SP", "EP 2")),
    _row("Gemma", "GemmaConfig", "scaled and tied embedding, wide heads", head_dim=32),
    _row("Gemma, stretched", "GemmaConfig", "rotary scaling `yarn`", head_dim=32, rope_parameters=_FOUR_FOLD, layouts=(),
         like_another=True, repeats=True),
    _row("Gemma 2, stretched", "Gemma2Config", "rotary scaling `linear`", head_dim=32, sliding_window=8, layouts=(),
         query_pre_attn_scalar=24, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
         like_another=True),
    _row("Gemma 2", "Gemma2Config", "alternating windows, soft caps, post-norms, attention scale", head_dim=32,
         sliding_window=8, query_pre_attn_scalar=24, attn_logit_softcapping=5.0, final_logit_softcapping=3.0, repeats=True),
    _row("Gemma 3", "Gemma3TextConfig", "local and global rotary bases, rotary scaling `linear` in global layers, QK norm",
         head_dim=32, sliding_window=8, query_pre_attn_scalar=24,
         layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
         rope_parameters={"full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
                          "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}),
    _row("Phi-3 mini", "Phi3Config", "fused projections, sliding window", sliding_window=7, like_another=True),
    _row("Phi-3, part rotated", "Phi3Config", "half of the channels rotated, grouped queries", sliding_window=None,
         rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
         like_another=True, repeats=True),
    _row("Phi-3 mini and medium, 128k", "Phi3Config", "rotary scaling `longrope`, beyond the original length",
         sliding_window=None, max_position_embeddings=96, original_max_position_embeddings=16,
         rope_parameters=_per_channel(16)),
    _row("Phi-4 mini", "Phi3Config", "`longrope` within the original length, three quarters rotated, tied embedding",
         sliding_window=None, tie_word_embeddings=True, max_position_embeddings=384, original_max_position_embeddings=48,
         rope_parameters=_per_channel(12) | {"partial_rotary_factor": 0.75},
         like_another=True),
    _row("GPT-OSS", "GptOssConfig", "attention sinks, alternating windows, `yarn`, biases, clamped gates", head_dim=16,
         sliding_window=8, num_local_experts=4, num_experts_per_tok=2, intermediate_size=32, layouts=_EXPERTS,
         with_tp=EXPERT_RANKS,
         rope_parameters={"rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
                          "truncate": False, "original_max_position_embeddings": 16}),
    _row("GPT-OSS, plain positions", "GptOssConfig", "no rotary scaling, windows in some layers", head_dim=16,
         sliding_window=8, num_local_experts=4, num_experts_per_tok=2, intermediate_size=32, layouts=("PP 2", "EP 2"),
         layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
         rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, repeats=True),
    _row("DeepSeek V2", "DeepseekV2Config", "expert groups ranked by their best expert, latent queries, shared experts, a "
         "dense layer, `yarn`", _LLAMA | _LATENT, topk_method="group_limited_greedy", n_group=4, topk_group=2, layouts=_EXPERTS),
    _row("DeepSeek V2-Lite", "DeepseekV2Config", "no expert groups, no latent queries", _LLAMA | _LATENT | {"q_lora_rank": None},
         topk_method="greedy", layouts=_EXPERTS,
         like_another=True),
    _row("DeepSeek V3", "DeepseekV3Config", "expert groups ranked by their best two, sigmoid router, expert biases, weights "
         "of multi-token prediction", _LLAMA | _LATENT, n_group=4, topk_group=2, layouts=_EXPERTS,
         released=_with_further_prediction),
    _row("DeepSeek V3, plain positions", "DeepseekV3Config", "no rotary scaling, groups, dense layer or latent queries",
         _LLAMA | _LATENT | {"q_lora_rank": None, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0}, n_group=1,
         topk_group=1, layouts=_EXPERTS, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
         like_another=True),
    _row("Moonlight, Kimi K2", "DeepseekV3Config", "as DeepSeek V3 without groups, with another epsilon",
         _LLAMA | _LATENT | {"q_lora_rank": 24, "num_nextn_predict_layers": 0}, n_group=1, topk_group=1, layouts=_EXPERTS,
         rms_norm_eps=1e-3, repeats=True),
    _row("Nemotron 3, 4", "NemotronConfig", "zero-centered norms with biases, squared ReLU, half of the channels rotated",
         head_dim=32, rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}),
    _row("Nemotron-H, Nemotron Nano v2", "NemotronHConfig", "Mamba mixers, attention, feed-forward", _LLAMA | _HYBRID,
         trained=True),
    _row("Nemotron 3 Nano", "NemotronHConfig", "ungated experts, a shared expert, sigmoid router, expert biases", _LLAMA | _HYBRID
         | _ROUTED, layouts=_EXPERTS,
         trained=True),
    _row("Mamba 2", "Mamba2Config", "Mamba mixers only, tied embedding",
         {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": 4, "num_heads": 8, "head_dim": 16,
          "state_size": 16, "n_groups": 1, "expand": 2, "chunk_size": 16, "pad_token_id": None, "bos_token_id": None,
          "eos_token_id": None, "tie_word_embeddings": True}, layouts=("PP 2",)),
    _row("StarCoder", "GPTBigCodeConfig", "multi-query attention, learned positions", _GPT2, layouts=("PP 2",)),
    _row("StarCoder, many keys", "GPTBigCodeConfig", "multi-head attention, exact GELU", _GPT2, multi_query=False,
         activation_function="gelu"),
    _row("StarCoder 2", "Starcoder2Config", "sliding window, LayerNorm, biases, tied embedding", sliding_window=8,
         tie_word_embeddings=True),
    _row("Baichuan 2 (by a Llama)", "LlamaConfig", "output rows normalized", num_key_value_heads=4,
         released=_as_baichuan, readable=False, computes_as=_normalise_rows,
         like_another=True),
    _row("ChatGLM 3 (by a GLM)", "GlmConfig", "half of the channels rotated in pairs, QKV biases", head_dim=16,
         rope_parameters={"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
         released=_as_chatglm, readable=False,
         like_another=True),
    _row("ChatGLM 3 as GLM", "GlmConfig", "the same, as exported", head_dim=16,
         rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}),
    _row("GLM, stretched", "GlmConfig", "rotary scaling `yarn` of half of the channels", head_dim=16, layouts=(),
         rope_parameters=_FOUR_FOLD | {"partial_rotary_factor": 0.5},
         like_another=True, repeats=True),
    _row("SmolLM 3", "SmolLM3Config", "every other layer without positions, tied embedding", no_rope_layer_interval=2,
         tie_word_embeddings=True),
    _row("Seed-OSS", "SeedOssConfig", "QKV biases, explicit head width", head_dim=32, attention_bias=True,
         attention_dropout=0.0, residual_dropout=0.0, max_position_embeddings=64),
    _row("Qwen 2 MoE", "Qwen2MoeConfig", "experts, a shared expert with a gate, expert weights not renormalized",
         num_experts=8, num_experts_per_tok=4, moe_intermediate_size=32, shared_expert_intermediate_size=48, layouts=_EXPERTS,
         trained=True),
    _row("Qwen 2 MoE, mixed", "Qwen2MoeConfig", "some dense layers, expert weights renormalized", num_experts=4,
         num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=40, mlp_only_layers=[0, 2],
         norm_topk_prob=True, layouts=_EXPERTS, repeats=True),
    _row("Qwen3-Next", "Qwen3NextConfig", "gated DeltaNet in three of four layers, attention with a gate, norms centered on "
         "zero, a quarter of the channels rotated, experts, a shared expert with a gate", _LLAMA | _LINEAR, **_SLOWLY, **_SHARED,
         num_experts=8, num_experts_per_tok=4, layouts=_EXPERTS,
         trained=True),
    _row("Qwen3-Next, mixed", "Qwen3NextConfig", "another order of the layers, some of them dense, expert weights not "
         "renormalized", _LLAMA | _LINEAR, **_SLOWLY, **_SHARED, num_experts=4, num_experts_per_tok=2, norm_topk_prob=False,
         mlp_only_layers=[0, 2], linear_conv_kernel_dim=3, layouts=_EXPERTS,
         layer_types=["full_attention", "linear_attention", "linear_attention", "full_attention"],
         trained=True),
    _row("Qwen 3.5", "Qwen3_5TextConfig", "gated DeltaNet in three of four layers, attention with a gate, dense, tied embedding",
         _LLAMA | _LINEAR, **_SLOWLY, tie_word_embeddings=True,
         trained=True),
    _row("Qwen 3.5 MoE", "Qwen3_5MoeTextConfig", "the same with experts and a shared expert with a gate, untied",
         _OF_EXPERTS | _LINEAR, **_SLOWLY, **_SHARED, num_experts=8, num_experts_per_tok=4, layouts=_EXPERTS,
         trained=True),
    _row("Qwen 3.5 MoE, stacked", "Qwen3_5MoeTextConfig", "the same as in a file with a vision model: a tensor for all experts",
         _OF_EXPERTS | _LINEAR, **_SLOWLY, **_SHARED, num_experts=4, num_experts_per_tok=2, layouts=("EP 2",),
         released=_with_stacked_experts, readable=False),
    _row("Command R, Aya", "CohereConfig", "attention and feed-forward in parallel, LayerNorm without biases, channels "
         "rotated in pairs, scaled logits, tied embedding", _COHERE, logit_scale=0.3, tie_word_embeddings=True),
    _row("Command R, many keys", "CohereConfig", "the same with multi-head attention, untied", _COHERE, num_key_value_heads=4,
         intermediate_size=88, logit_scale=2.0, tie_word_embeddings=False,
         rope_parameters={"rope_type": "linear", "rope_theta": 8e6, "factor": 2.0},
         like_another=True, repeats=True),
    _row("Command R7B, Command A", "Cohere2Config", "a window in three of four layers, no positions in the fourth", _COHERE,
         sliding_window=8, logit_scale=0.25, tie_word_embeddings=True,
         trained=True),
    _row("Command R7B, every other window", "Cohere2Config", "the same with other layers without a window, untied", _COHERE,
         sliding_window=11, tie_word_embeddings=False,
         layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
         like_another=True, repeats=True),
    _row("Granite 3", "GraniteConfig", "multipliers of embedding, blocks, scores and logits, tied embedding",
         embedding_multiplier=6.0, residual_multiplier=0.22, attention_multiplier=0.05, logits_scaling=4.0,
         tie_word_embeddings=True,
         trained=True),
    _row("Granite 3, biases", "GraniteConfig", "the same with biases in all linear layers", attention_bias=True, mlp_bias=True,
         embedding_multiplier=3.0, residual_multiplier=0.5, attention_multiplier=0.1, logits_scaling=2.0),
    _row("Granite 3 MoE", "GraniteMoeConfig", "experts, multipliers of embedding, blocks, scores and logits, tied embedding",
         num_local_experts=8, num_experts_per_tok=3, intermediate_size=40, embedding_multiplier=6.0, residual_multiplier=0.22,
         attention_multiplier=0.05, logits_scaling=4.0, tie_word_embeddings=True, layouts=_EXPERTS),
    _row("Granite 3 MoE, shared expert", "GraniteMoeSharedConfig", "the same with a shared expert, untied", num_local_experts=4,
         num_experts_per_tok=2, intermediate_size=32, shared_intermediate_size=48, embedding_multiplier=3.0,
         residual_multiplier=0.5, attention_multiplier=0.1, logits_scaling=2.0, num_key_value_heads=4, layouts=_EXPERTS,
         trained=True, like_another=True),
    _row("GLM-4.5", "Glm4MoeConfig", "half of the channels rotated, QKV biases, QK norm, a dense layer, expert biases, weights "
         "of multi-token prediction", head_dim=16, attention_bias=True, use_qk_norm=True, n_routed_experts=8,
         num_experts_per_tok=4, moe_intermediate_size=32, routed_scaling_factor=2.5, num_mtp_layers=0, layouts=_EXPERTS,
         released=_with_further_prediction),
    _row("GLM-4.5 Air", "Glm4MoeConfig", "no QK norm, no further prediction", head_dim=32, attention_bias=True,
         n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, layouts=_EXPERTS, num_mtp_layers=0),
    _row("OLMo 2", "Olmo2Config", "norms behind blocks only, QK norm over all heads",
         trained=True),
    _row("OLMo 2, many keys", "Olmo2Config", "the same with multi-head attention", num_key_value_heads=4, rms_norm_eps=1e-6,
         rope_parameters={"rope_type": "default", "rope_theta": 500000.0}, repeats=True),
    _row("OLMo 3", "Olmo3Config", "a window in three of four layers, YaRN in the fourth, norms behind blocks only, QK norm over "
         "all heads", sliding_window=8, rope_parameters={"full_attention": {**_FOUR_FOLD, "rope_theta": 500000.0},
         "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0}},
         trained=True),
    _row("OLMo 3, many keys", "Olmo3Config", "the same with multi-head attention, other layers with a window, without YaRN",
         num_key_value_heads=4, sliding_window=12,
         layer_types=["full_attention", "sliding_attention", "full_attention", "sliding_attention"]),
    _row("Ministral 3", "Ministral3Config", "YaRN, queries that grow with their position, explicit head width", head_dim=32,
         rope_parameters={**_FOUR_FOLD, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
         trained=True),
    _row("Ministral 3, tied", "Ministral3Config", "the same with a tied embedding and YaRN's factor of attention", head_dim=16,
         tie_word_embeddings=True, rope_parameters={**_FOUR_FOLD, "rope_theta": 1e6, "llama_4_scaling_beta": 0.3}, repeats=True),
    _row("ERNIE 4.5", "Ernie4_5Config", "channels rotated in pairs, explicit head width, tied embedding", head_dim=32),
    _row("ERNIE 4.5, biases", "Ernie4_5Config", "the same with biases in all linear layers, untied", head_dim=16, use_bias=True,
         tie_word_embeddings=False, repeats=True),
    _row("Hunyuan", "HunYuanDenseV1Config", "QK norm after the rotation, raised rotary base, tied embedding", head_dim=32,
         tie_word_embeddings=True, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 50.0},
         trained=True, repeats=True),
    _row("Hunyuan, plain base", "HunYuanDenseV1Config", "the same with the plain rotary base, untied", head_dim=16,
         num_key_value_heads=4),
    _row("Hunyuan MoE", "HunYuanMoEV1Config", "the same with experts and a shared one, raised rotary base, tied embedding",
         head_dim=32, tie_word_embeddings=True, num_experts=8, moe_topk=3, intermediate_size=40, layouts=_EXPERTS,
         rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 50.0}),
    _row("Hunyuan MoE, plain base", "HunYuanMoEV1Config", "the same with the plain rotary base, untied", head_dim=16,
         num_key_value_heads=4, num_experts=4, moe_topk=2, intermediate_size=32, layouts=_EXPERTS,
         like_another=True, repeats=True),
    _row("ERNIE 4.5 MoE", "Ernie4_5_MoeConfig", "experts selected by softmax scores plus a bias, shared experts, a dense layer, "
         "channels rotated in pairs, tied embedding", head_dim=32, moe_num_experts=8, moe_k=3, moe_intermediate_size=40,
         layouts=_EXPERTS),
    _row("ERNIE 4.5 MoE, no shared experts", "Ernie4_5_MoeConfig", "experts in every other layer, untied", head_dim=16,
         moe_num_experts=4, moe_k=2, moe_intermediate_size=32, moe_num_shared_experts=0, moe_layer_start_index=1,
         moe_layer_interval=2, tie_word_embeddings=False, layouts=_EXPERTS,
         like_another=True),
    _row("OLMoE", "OlmoeConfig", "experts, QK norm over all heads, expert weights not renormalized", num_experts=8,
         num_experts_per_tok=4, layouts=_EXPERTS),
    _row("OLMoE, renormalized", "OlmoeConfig", "expert weights renormalized, multi-head attention", num_experts=4,
         num_experts_per_tok=2, num_key_value_heads=4, norm_topk_prob=True, layouts=_EXPERTS, like_another=True),
    _row("MiniMax M2", "MiniMaxM2Config", "sigmoid router, expert biases, half of the channels rotated, QK norm over all heads",
         head_dim=32, num_local_experts=8, num_experts_per_tok=4, intermediate_size=32, layouts=_EXPERTS,
         rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}),
    _row("GPT-2, GPT-3", "GPT2Config", "learned positions, transposed weights, tied embedding", _GPT2),
)  # fmt: skip


def released_config(row: Row) -> dict[str, Any]:
    """The config.json of a row's release, without weights."""
    import transformers

    config = getattr(transformers, row.config)(**row.fields).to_dict()
    classes = {
        "GPT2Config": "GPT2LMHeadModel",
        "Llama4TextConfig": "Llama4ForCausalLM",
        "Gemma3TextConfig": "Gemma3ForCausalLM",
        "Qwen3_5TextConfig": "Qwen3_5ForCausalLM",
        "Qwen3_5MoeTextConfig": "Qwen3_5MoeForCausalLM",
    }
    config["architectures"] = [classes.get(row.config, row.config.replace("Config", "ForCausalLM"))]
    return config if row.released is None else row.released({}, config)[1]
