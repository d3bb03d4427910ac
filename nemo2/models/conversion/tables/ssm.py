# SPDX-License-Identifier: Apache-2.0
"""The conversion of Mamba 2, its hybrid with attention, Nemotron-H, Nemotron Nano v2 and Nemotron 3."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.activations import squared_relu

from nemo2.base.backend.compilation import uncompiled
from nemo2.models.conversion.decoder import decoder_conversion, feed_forward, output_layer
from nemo2.models.conversion.experts import check_routing
from nemo2.models.conversion.pieces import one, qkv
from nemo2.models.conversion.positions import UNROTATED
from nemo2.models.conversion.settings import Config, Field, Translation, decoder_fields, read, refusal, without, written
from nemo2.models.conversion.table import Row, linear, norm, under
from nemo2.models.hybrid_pattern import hybrid_pattern
from nemo2.models.ssm import BaseMambaConfig130M, MambaModel, NemotronHConfigBase, SSMConfig

_MAMBA = [
    Field("vocab_size", "vocab_size"),
    Field("num_hidden_layers", "num_layers"),
    Field("hidden_size", "hidden_size"),
    Field("head_dim", "mamba_head_dim", 64),
    Field("num_heads", "mamba_num_heads"),
    Field("state_size", "mamba_state_dim", 128),
    Field("n_groups", "mamba_num_groups", 8),
    Field("initializer_range", "init_method_std", 0.1),
    Field("tie_word_embeddings", "share_embeddings_and_output_weights", False),
]
_HYBRID = [
    *without(
        decoder_fields(num_key_value_heads=8, max_position_embeddings=4096),
        "num_hidden_layers",
        "rms_norm_eps",
        "head_dim",
        "tie_word_embeddings",
    ),
    Field("layer_norm_epsilon", "layernorm_epsilon", 1e-5),
    Field("hidden_dropout", "hidden_dropout", 0.0),
    Field("ssm_state_size", "mamba_state_dim", 128),
    Field("mamba_num_heads", "mamba_num_heads", 128),
    Field("mamba_head_dim", "mamba_head_dim", 64),
    Field("n_groups", "mamba_num_groups", 8),
]
_EXPERTS = [
    Field("n_routed_experts", "num_moe_experts", 8),
    Field("num_experts_per_tok", "moe_router_topk", 2),
    Field("moe_intermediate_size", "moe_ffn_hidden_size", 7688),
    Field("moe_shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", 7688),
    Field("routed_scaling_factor", "moe_router_topk_scaling_factor", 1.0),
    Field("n_group", "moe_router_num_groups", 1),
    Field("topk_group", "moe_router_group_topk", 1),
]
# Megatron-Core's projection to fewer channels before the experts needs Transformer Engine's layers, and isn't tested here.
_ONLY_ROUTED = {"norm_topk_prob": True, "moe_latent_size": None}
# Our mixer's gated norm has this epsilon, independently of the other norms.
_MIXER = {"conv_kernel": 4, "use_conv_bias": True, "layer_norm_epsilon": 1e-5, "use_bias": False}
_ONLY_MAMBA = _MIXER | {"model_type": "mamba2", "hidden_act": "silu"}
_ONLY_HYBRID = _MIXER | {"model_type": "nemotron_h", "mamba_hidden_act": "silu", "mamba_proj_bias": False}
_ONLY_HYBRID |= {
    "attention_bias": False,
    "mlp_bias": False,
    "num_nextn_predict_layers": 0,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
_KINDS = {"mamba": "M", "linear_attention": "M", "mlp": "-", "attention": "*", "full_attention": "*", "moe": "E"}
_LETTERS = {"M": "mamba", "-": "mlp", "*": "attention", "E": "moe"}
_ACTIVATIONS = {"relu2": squared_relu, "gelu": F.gelu}


def _table(config: SSMConfig) -> list[Row]:
    """Each layer has one of four kinds, and a norm before it."""
    pattern = _letters(config)
    kinds = {
        "M": _mixer(config),
        "*": [
            *norm("self_attention.linear_qkv.layer_norm_", one("norm.")),
            *linear("self_attention.linear_qkv.", qkv("mixer.q_proj.", "mixer.k_proj.", "mixer.v_proj.")),
            *linear("self_attention.linear_proj.", one("mixer.o_proj.")),
        ],
        "-": feed_forward(one("mixer.up_proj."), "mixer.down_proj.", norm_name="norm."),
        "E": [
            *norm("pre_mlp_layernorm.", one("norm.")),
            Row("mlp.router.weight", one("mixer.gate.weight")),
            Row("mlp.router.expert_bias", one("mixer.gate.e_score_correction_bias"), dtype=torch.float32),
            *linear("mlp.experts.experts.linear_fc1.", one("mixer.experts.*.up_proj.")),
            *linear("mlp.experts.experts.linear_fc2.", one("mixer.experts.*.down_proj.")),
            *linear("mlp.shared_experts.linear_fc1.", one("mixer.shared_experts.up_proj.")),
            *linear("mlp.shared_experts.linear_fc2.", one("mixer.shared_experts.down_proj.")),
        ],
    }
    layers = [
        replace(row, layers=[n for n, letter in enumerate(pattern) if letter == kind])
        for kind, part in kinds.items()
        for row in part
    ]
    return [
        Row("embedding.word_embeddings.weight", one("backbone.embeddings.weight")),
        *under("decoder.layers.*.", "backbone.layers.*.", layers),
        Row("decoder.final_norm.weight", one("backbone.norm_f.weight")),
        *output_layer(config, "lm_head.weight"),
    ]


def _letters(config: SSMConfig) -> str:
    """The kinds of the decoder's layers. "": the configuration has no pattern."""
    pattern = hybrid_pattern(config) if config.hybrid_override_pattern else None
    return pattern.decoder if pattern else ""


def _mixer(config: SSMConfig) -> list[Row]:
    """Megatron-Core stores the parts of the first projection and of the convolution separately."""
    inner, states = _heads(config) * config.mamba_head_dim, config.mamba_num_groups * config.mamba_state_dim
    starts = {"z": 0, "x": inner, "B": 2 * inner, "C": 2 * inner + states, "dt": 2 * (inner + states)}
    convolved = {"x": 0, "B": inner, "C": inner + states}
    return [
        *norm("mixer.in_proj.layer_norm_", one("norm.")),
        *(Row(f"mixer.in_proj.weight.{part}", one("mixer.in_proj.weight", start)) for part, start in starts.items()),
        *(
            Row(f"mixer.conv1d.{end}.{part}", one(f"mixer.conv1d.{end}", start))
            for end in ("weight", "bias")
            for part, start in convolved.items()
        ),
        *(Row(f"mixer.{name}", one(f"mixer.{name}")) for name in ("A_log", "D", "dt_bias", "norm.weight")),
        *linear("mixer.out_proj.", one("mixer.out_proj.")),
    ]


def _of_mixers(hf: Config) -> dict[str, Any]:
    fields = read(hf, _MAMBA)
    if fields["mamba_num_groups"] != 1:
        raise refusal(
            hf,
            "n_groups",
            "transformers' Mamba 2 normalizes all groups together, nemo2's each group separately; it must be 1",
        )
    if fields["mamba_num_heads"] * fields["mamba_head_dim"] != hf.get("expand", 2) * fields["hidden_size"]:
        raise refusal(hf, "expand", "it must be num_heads * head_dim / hidden_size")
    return {"hybrid_override_pattern": "M" * fields["num_layers"], "ffn_hidden_size": fields["hidden_size"]}


def _mixers_of(ours: SSMConfig) -> dict[str, Any]:
    heads = _heads(ours)
    return {"num_heads": heads, "expand": heads * ours.mamba_head_dim // ours.hidden_size}


def _of_hybrid(hf: Config) -> dict[str, Any]:
    activation = hf.get("mlp_hidden_act", "relu2")
    if activation not in _ACTIVATIONS:
        raise refusal(hf, "mlp_hidden_act", f"nemo2's hybrids support {', '.join(map(repr, _ACTIVATIONS))}")
    pattern = hf.get("hybrid_override_pattern")
    if pattern is None:
        kinds = hf.get("layers_block_type") or hf.get("layer_types") or []
        pattern = "".join(_KINDS.get(kind, "?") for kind in kinds)
        field = "layers_block_type"
    else:
        field = "hybrid_override_pattern"
    if not pattern or set(pattern) - set(_LETTERS):
        raise refusal(hf, field, "the layers of nemo2's hybrids are mixers, attention, feed-forward blocks and experts")
    return {
        "num_layers": len(pattern),
        "hybrid_override_pattern": pattern,
        **(_routing(hf) if "E" in pattern else {}),
        "kv_channels": hf.get("head_dim") or hf.get("attention_head_dim") or 128,
        "activation_func": _ACTIVATIONS[activation],
    }


def _routing(hf: Config) -> dict[str, Any]:
    """Settings of experts, whose router is DeepSeek V3's."""
    fields = read(hf, _EXPERTS, only=_ONLY_ROUTED)
    check_routing(hf, fields)
    router = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_dtype": "fp32"}
    return {**fields, **router, "moe_grouped_gemm": True, "moe_token_dispatcher_type": "alltoall"}


def _hybrid_of(ours: SSMConfig) -> dict[str, Any]:
    pattern = _letters(ours)
    # The CPU backend, if it was installed after this module was imported, removes Megatron-Core's compilation.
    names = {uncompiled(function): name for name, function in _ACTIVATIONS.items()}
    heads = _heads(ours)
    return {
        "num_hidden_layers": len(pattern),
        "hybrid_override_pattern": pattern,
        "layers_block_type": [_LETTERS.get(letter, letter) for letter in pattern],
        "mlp_hidden_act": names.get(uncompiled(ours.activation_func), getattr(ours.activation_func, "__name__", "")),
        "mamba_num_heads": heads,
        "expand": max(1, heads * ours.mamba_head_dim // ours.hidden_size),
        "num_key_value_heads": ours.num_query_groups or ours.num_attention_heads,
        "head_dim": ours.kv_channels,
        "attention_head_dim": ours.kv_channels,
        **(written(ours, _EXPERTS, only=_ONLY_ROUTED | {"n_shared_experts": 1}) if "E" in pattern else {}),
    }


def _heads(ours: SSMConfig) -> int:
    return ours.mamba_num_heads or 2 * ours.hidden_size // ours.mamba_head_dim


def _any_step(hf: Config) -> dict[str, Any]:
    """Check that time steps aren't limited. transformers 5 writes infinity as an object with its name.

    Raises:
        ConfigError: they are limited.
    """
    limits = hf.get("time_step_limit") or (0.0, math.inf)
    if [float(limit["__float__"] if isinstance(limit, dict) else limit) for limit in limits] != [0.0, math.inf]:
        raise refusal(hf, "time_step_limit", "nemo2's mixers don't limit time steps, so it must be [0, infinity]")
    return {}


_conversion = partial(decoder_conversion, model=MambaModel, rows=_table, rotary=UNROTATED)
MAMBA = _conversion(
    "Mamba2ForCausalLM",
    kind=BaseMambaConfig130M,
    fields=_MAMBA,
    only=_ONLY_MAMBA,
    translations=[Translation(_any_step), Translation(_of_mixers, _mixers_of)],
)
NEMOTRON_H = _conversion(
    "NemotronHForCausalLM",
    kind=NemotronHConfigBase,
    configs=(SSMConfig,),
    fields=_HYBRID,
    only=_ONLY_HYBRID,
    translations=[Translation(_any_step), Translation(_of_hybrid, _hybrid_of)],
)
