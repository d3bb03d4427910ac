# SPDX-License-Identifier: Apache-2.0
"""Converts between config.json and nemo2's configurations: fields under both names, and settings that only one side has.

A family lists its fields (`Field`) and the fixed behavior of its class (``only=``). Defaults are those of transformers'
class, because config.json leaves out defaults. This module doesn't need transformers.

The `meaning` of a configuration determines what a model computes: two configurations with the same meaning are the same
model. `said` reads an exported configuration again and compares it with the original, so that no relevant setting gets
lost.
"""

import json
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch.nn.functional as F
from megatron.core.transformer.utils import is_layer_window_attention

from nemo2.base.backend.compilation import as_megatron_has_it
from nemo2.base.errors import ConfigError
from nemo2.models.hybrid_pattern import without_stages
from nemo2.models.walker import expert_layers

Config = Mapping[str, Any]
"""The contents of config.json."""
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
NEEDED: Any = object()
"""The default of a field that config.json must have."""
DERIVED: Any = object()
"""The default of ``head_dim`` where transformers' class doesn't declare it, but reads it: ``hidden_size /
num_attention_heads``."""


@dataclass(frozen=True)
class Field:
    """A setting: its name in config.json, its name in nemo2, and its value if config.json omits it (None: unset)."""

    theirs: str
    ours: str
    default: Any = NEEDED


def decoder_fields(**defaults: Any) -> list[Field]:
    """The fields that most decoders since Llama have. ``defaults`` are those of transformers' class that differ from
    Llama's."""
    values = {"num_key_value_heads": None, "head_dim": None, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
    values |= {"max_position_embeddings": 2048, "initializer_range": 0.02, "attention_dropout": 0.0} | defaults
    names = {
        "vocab_size": "vocab_size",
        "num_hidden_layers": "num_layers",
        "hidden_size": "hidden_size",
        "intermediate_size": "ffn_hidden_size",
        "num_attention_heads": "num_attention_heads",
        "num_key_value_heads": "num_query_groups",
        "head_dim": "kv_channels",
        "max_position_embeddings": "seq_length",
        "initializer_range": "init_method_std",
        "rms_norm_eps": "layernorm_epsilon",
        "attention_dropout": "attention_dropout",
        "tie_word_embeddings": "share_embeddings_and_output_weights",
    }
    return [Field(theirs, ours, values.get(theirs, NEEDED)) for theirs, ours in names.items()]


_OF_EXPERTS = {
    "num_experts": "num_moe_experts",
    "num_local_experts": "num_moe_experts",
    "n_routed_experts": "num_moe_experts",
    "num_experts_per_tok": "moe_router_topk",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "shared_intermediate_size": "moe_shared_expert_intermediate_size",
    "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
    "router_aux_loss_coef": "moe_aux_loss_coeff",
    "routed_scaling_factor": "moe_router_topk_scaling_factor",
}


def expert_fields(**defaults: Any) -> list[Field]:
    """The fields of models with experts. Those of a family are ``defaults``, by their names in config.json."""
    return [Field(theirs, _OF_EXPERTS[theirs], default) for theirs, default in defaults.items()]


@dataclass(frozen=True)
class Translation:
    """Settings that have another form in config.json, as a function for each direction."""

    ours: Callable[[Config], dict[str, Any]] = lambda hf: {}
    """nemo2's settings for a config.json."""
    theirs: Callable[[Any], dict[str, Any]] = lambda own: {}
    """The fields of config.json for a configuration of nemo2."""


def without(fields: Iterable[Field], *theirs: str) -> list[Field]:
    """``fields`` without those named ``theirs`` in config.json."""
    return [field for field in fields if field.theirs not in theirs]


def read(hf: Config, fields: Iterable[Field], *, only: Config | None = None) -> dict[str, Any]:
    """The settings of config.json under nemo2's names.

    ``only`` are values that config.json must have if it has the field.

    Raises:
        ConfigError: a required field is missing, or a field of ``only`` has another value.
    """
    for name, value in (only or {}).items():
        must_be(hf, name, value)
    settings = {}
    for field in fields:
        if hf.get(field.theirs) is None and field.default is NEEDED:
            raise missing_field(hf, field.theirs)
        value = hf.get(field.theirs, field.default)
        settings[field.ours] = None if value is DERIVED else value
    return settings


def text_config(hf: Config) -> Config:
    """The text model's part of config.json. In a vision model's file it is an object of its own."""
    if "text_config" not in hf:
        return hf
    if not isinstance(hf["text_config"], Mapping):
        raise refusal(hf, "text_config", "it must be an object with the fields of the text model")
    shared = {name: hf[name] for name in ("architectures", "tie_word_embeddings") if name in hf}
    return {**shared, **hf["text_config"]}


def overlaid(hf: Config, **fields: Any) -> Config:
    """config.json with other values of some fields. It is no copy, so `families` still sees which fields are read."""
    return ChainMap(fields, hf)  # pyright: ignore[reportArgumentType]  # a mapping that is only read


def must_be(hf: Config, name: str, *values: Any) -> None:
    """Check that a field of config.json has one of ``values``. It may also be missing.

    Raises:
        ConfigError: the field has another value.
    """
    if name in hf and hf[name] not in values:
        raise refusal(hf, name, f"nemo2's model supports only {' or '.join(map(repr, values))}")


def refusal(hf: Config, name: str, reason: str) -> ConfigError:
    """The error for a value of config.json that nemo2's model doesn't support."""
    architecture = (hf.get("architectures") or [hf.get("model_type", "model")])[0]
    return ConfigError(f"config.json ({architecture}) has {name}={hf.get(name)!r}: {reason}.")


def missing_field(hf: Config, name: str) -> ConfigError:
    """The error for a field that config.json must have."""
    architecture = (hf.get("architectures") or [hf.get("model_type", "model")])[0]
    return ConfigError(f"config.json ({architecture}) has no {name}, which this architecture requires: add it.")


def written(ours: Any, fields: Iterable[Field], *, only: Config | None = None) -> dict[str, Any]:
    """The fields of config.json for these fields of nemo2's configuration.

    Special tokens are None: they are the tokenizer's, and defaults of transformers' classes may exceed a small
    vocabulary.
    """
    tokens = dict.fromkeys(SPECIAL_TOKENS)
    values = {field: getattr(ours, field.ours) for field in fields}
    derived = [ours.hidden_size // ours.num_attention_heads, None]
    values = {field: v for field, v in values.items() if field.default is not DERIVED or v not in derived}
    # transformers 5 rejects an integer in place of a float.
    json_values = {
        f.theirs: float(v) if isinstance(f.default, float) and v is not None else v for f, v in values.items()
    }
    return {**tokens, **(only or {}), **json_values}


# Windows

FULL, SLIDING = "full_attention", "sliding_attention"


def window_of(size: Optional[int]) -> Optional[tuple[int, int]]:
    """nemo2's window for a token that attends to ``size`` tokens, itself included. None: no window."""
    return None if size is None else (size - 1, 0)


def size_of(window: Optional[tuple[int, int]]) -> Optional[int]:
    """The inverse of `window_of`."""
    return None if window is None or window[0] < 0 else window[0] + 1


def windowed_layers(ours: Any) -> list[bool]:
    """Whether each layer has the window."""
    window, windowed = ours.window_size, size_of(ours.window_size) is not None
    skip: Any = getattr(ours, "window_attn_skip_freq", None)
    return [windowed and is_layer_window_attention(window, skip, number + 1) for number in range(ours.num_layers)]


def layer_types(ours: Any) -> list[str]:
    return [SLIDING if windowed else FULL for windowed in windowed_layers(ours)]


def kinds_of_layers(hf: Config, *, every: int, kind: str = SLIDING) -> list[str]:
    """``layer_types``. If config.json omits it, every n-th layer attends to everything, and the others are of ``kind``."""
    layers = range(1, hf["num_hidden_layers"] + 1)
    return hf.get("layer_types") or [kind if layer % every else FULL for layer in layers]


def alternating_windows(*, every: int, size: int = 4096) -> Translation:
    """A window in all but every n-th layer. ``every`` and ``size`` are defaults."""

    def ours(hf: Config) -> dict[str, Any]:
        skipped = pattern_of(hf, kinds_of_layers(hf, every=every))
        return {"window_size": window_of(hf.get("sliding_window", size)), "window_attn_skip_freq": skipped}

    return Translation(ours, lambda own: {"sliding_window": size_of(own.window_size), "layer_types": layer_types(own)})


def uniform_window(size: Optional[int] = None) -> Translation:
    """A window in all layers. ``size`` is the default."""

    def ours(hf: Config) -> dict[str, Any]:
        window = window_of(hf.get("sliding_window", size))
        # Transformer Engine splits a sequence with a window over context-parallel ranks only by all-to-all.
        return {"window_size": window, "cp_comm_type": None if window is None else "a2a"}

    return Translation(ours, lambda own: {"sliding_window": size_of(own.window_size)})


def rotated_layers(ours: Any) -> list[int]:
    """A 1 for each layer that rotates positions, a 0 for the others, as ``no_rope_layers`` in config.json has them."""
    return [int(not flag) for flag in meaning(ours)["without_positions"] or [0] * ours.num_layers]


def pattern_of(hf: Config, types: Sequence[str], kind: str = SLIDING) -> Any:
    """The layers of ``kind``, of which Megatron-Core knows the frequency: None if all layers are of it, n if every n-th layer
    attends to everything, otherwise a list.

    Raises:
        ConfigError: a kind is unknown, or the number of kinds isn't the number of layers.
    """
    unknown = set(types) - {FULL, kind}
    if unknown or len(types) != hf["num_hidden_layers"]:
        raise refusal(hf, "layer_types", f"nemo2's model needs {FULL!r} or {kind!r} for each layer")
    flags = [int(type_ == kind) for type_ in types]
    if all(flags):
        return None
    every = (
        n for n in range(2, len(flags) + 1) if flags == [int(layer % n != 0) for layer in range(1, len(flags) + 1)]
    )
    return next(every, flags)


# The settings that determine what a model computes

_DECIDES = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "vocab_size",
    "share_embeddings_and_output_weights", "normalization", "layernorm_epsilon", "layernorm_zero_centered_gamma",
    "pre_sublayer_layernorm", "post_sublayer_layernorm", "qk_layernorm_over_heads",
    "activation_func", "gated_linear_unit", "activation_func_clamp_value",
    "glu_linear_offset", "add_bias_linear", "add_qkv_bias", "qk_layernorm", "qk_l2_norm", "softmax_type",
    "experimental_attention_variant", "attention_output_gate",
    "attn_logit_softcapping", "final_logit_softcapping", "position_embedding_type", "rotary_percent",
    "rotary_interleaved", "rope_stretching", "seq_len_interpolation_factor", "scale_factor", "low_freq_factor",
    "high_freq_factor", "old_context_len", "yarn_rotary_scaling_factor", "yarn_original_max_position_embeddings",
    "yarn_beta_fast", "yarn_beta_slow", "yarn_mscale", "yarn_mscale_all_dim", "yarn_correction_range_round_to_int",
    "attention_chunk_size", "normalize_output_layer", "attn_temperature_tuning", "floor_scale", "attn_scale",
    "multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim",
    "rope_type", "rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale",
    "mscale_all_dim", "num_moe_experts", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size",
    "moe_router_topk", "moe_router_pre_softmax", "moe_router_score_function", "moe_router_num_groups",
    "moe_router_group_topk", "moe_router_group_score", "moe_router_topk_scaling_factor",
    "moe_router_enable_expert_bias", "moe_apply_probs_on_input", "moe_latent_size", "mtp_num_layers", "hybrid_override_pattern",
    "mamba_num_groups", "mamba_state_dim", "mamba_head_dim", "mup_embedding_mult", "mup_output_mult",
)  # fmt: skip


def meaning(ours: Any) -> dict[str, Any]:
    """The settings that decide what a model computes, in a form that doesn't depend on their notation."""
    settings = {name: getattr(ours, name, None) for name in (*_DECIDES, *getattr(ours, "deciding_fields", ()))}
    settings["activation_func"] = as_megatron_has_it(ours.activation_func)
    heads = ours.num_attention_heads
    settings["num_query_groups"] = ours.num_query_groups or heads
    settings["rotary_base"] = _listed(getattr(ours, "rotary_base", None))
    settings["window"] = [size_of(ours.window_size) if windowed else None for windowed in windowed_layers(ours)]
    settings["softmax_scale"] = round((ours.softmax_scale or ours.kv_channels**-0.5) ** -2, 6)
    skipped: Any = getattr(ours, "no_rope_freq", None)
    if isinstance(skipped, int):
        skipped = [layer % skipped == skipped - 1 for layer in range(ours.num_layers)]
    settings["without_positions"] = None if skipped is None else list(map(int, skipped))
    settings["experts_in"] = list(map(int, expert_layers(ours))) if ours.num_moe_experts else None
    if ours.activation_func is F.gelu and ours.add_bias_linear and not ours.gated_linear_unit:
        # The GELU that is fused with the bias is the tanh approximation.
        settings["activation_func"] = "tanh GELU" if ours.bias_activation_fusion else "GELU"
    settings["rope_scaling_factor"] = getattr(ours, "rope_scaling_factor", None)
    if getattr(ours, "rope_scaling", None) is False:
        settings |= dict.fromkeys(("rope_scaling_factor", "low_freq_factor", "high_freq_factor", "old_context_len"))
    if ours.position_embedding_type == "none":
        settings |= dict.fromkeys(("rotary_base", "rotary_percent"))
    elif ours.position_embedding_type == "learned_absolute":
        settings |= {"rotary_base": None, "rotary_percent": None, "positions": ours.seq_length}
    if settings["hybrid_override_pattern"]:
        settings["hybrid_override_pattern"] = without_stages(settings["hybrid_override_pattern"])
        settings["mamba_num_heads"] = ours.mamba_num_heads or 2 * ours.hidden_size // ours.mamba_head_dim
    else:
        settings |= dict.fromkeys(("mamba_num_groups", "mamba_state_dim", "mamba_head_dim"))
    if (settings["moe_router_num_groups"] or 1) == 1:
        settings |= dict.fromkeys(("moe_router_num_groups", "moe_router_group_topk", "moe_router_group_score"))
    if not ours.num_moe_experts:
        settings |= {name: None for name in settings if name.startswith("moe_")}
    blocks = getattr(ours, "heterogeneous_layers_config_encoded_json", None)
    if blocks:  # have their own widths and groups
        settings |= {"blocks": json.loads(blocks)["block_configs"], "ffn_hidden_size": None, "num_query_groups": None}
    return settings


def differences(one: Any, other: Any) -> dict[str, tuple[Any, Any]]:
    """The settings that decide what a model computes and differ between two configurations, by nemo2's names."""
    here, there = meaning(one), meaning(other)
    return {
        name: (here.get(name), there.get(name))
        for name in {**here, **there}
        if _listed(here.get(name)) != _listed(there.get(name))
    }


_FIELDS_OF = {
    "activation_func": ("activation_func", "bias_activation_fusion"),
    "window": ("window_size", "window_attn_skip_freq"),
    "without_positions": ("no_rope_freq",),
    "experts_in": ("moe_layer_freq",),
}
"""The fields behind the settings of `meaning` that have other names."""
TRAINED_OTHERWISE = (
    "%s: %s. These weights were trained with other values than the model computes with. Remove the settings, unless they are "
    "meant."
)
"""A warning: the weights, and what `contradicted` says."""


def contradictions(config: Any, trained: Any) -> dict[str, tuple[Any, Any]]:
    """The fields by which a model computes something else than the model of its weights, ``trained``, with both values."""
    fields = (field for name in differences(config, trained) for field in _FIELDS_OF.get(name, (name,)))
    values = {field: (getattr(config, field, None), getattr(trained, field, None)) for field in sorted({*fields})}
    # The vocabulary may be padded.
    return {field: (own, their) for field, (own, their) in values.items() if field != "vocab_size" and own != their}


def contradicted(config: Any, trained: Any, source: str) -> str:
    """`contradictions` in words. "": none. ``source`` is where ``trained`` comes from."""
    return ", ".join(
        f"model.config.{field}={own!r} where {source} says {their!r}"
        for field, (own, their) in contradictions(config, trained).items()
    )


def said(ours: Any, hf: dict[str, Any], config: Callable[[Config], Any]) -> dict[str, Any]:
    """``hf``, after a check that it describes the same model as nemo2's configuration.

    Raises:
        ConfigError: ``config`` reads another model from ``hf``. The message names the settings that would be lost.
    """
    rows = {} if ours.vocab_size is not None else {"vocab_size": 1}  # the embedding defines the size
    lost = {
        name: pair for name, pair in differences(ours, config({**hf, **rows})).items() if not (rows and name in rows)
    }
    if lost:
        fields = ", ".join(f"{name}={before!r} (it would become {after!r})" for name, (before, after) in lost.items())
        raise ConfigError(
            f"model.config ({type(ours).__name__}) can't be exported as a Hugging Face {hf.get('model_type')}, because its "
            f"config.json can't express {fields}. Export the model with the configuration class that it was trained with, or "
            "keep the family's values of these fields."
        )
    return hf


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
