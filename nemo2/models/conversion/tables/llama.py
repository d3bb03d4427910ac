# SPDX-License-Identifier: Apache-2.0
"""The conversions of Llama 2, 3, 3.1 and 3.2, Code Llama, and of SmolLM 3 and Seed-OSS."""

from typing import Any

from nemo2.models.conversion.decoder import BIASES, decoder_conversion, rows, unbiased
from nemo2.models.conversion.positions import any_scaling
from nemo2.models.conversion.settings import DERIVED, NEEDED, Config, Field, Translation, decoder_fields, rotated_layers
from nemo2.models.llama import Llama31Config, LlamaConfig, LlamaModel
from nemo2.models.seed_oss import SeedOSSConfig, SeedOSSModel
from nemo2.models.smollm3 import SmolLM3Config, SmolLM3Model

SCALING: dict[str, tuple[str, Any]] = {
    "factor": ("scale_factor", NEEDED),
    "low_freq_factor": ("low_freq_factor", NEEDED),
    "high_freq_factor": ("high_freq_factor", NEEDED),
    "original_max_position_embeddings": ("old_context_len", NEEDED),
}


def _kind(**settings: Any) -> LlamaConfig:
    return (Llama31Config if "scale_factor" in settings else LlamaConfig)(**settings)


LLAMA = decoder_conversion(
    "LlamaForCausalLM",
    LlamaModel,
    _kind,
    configs=(LlamaConfig,),
    rows=rows,
    fields=decoder_fields(),
    only={"model_type": "llama", "hidden_act": "silu"},
    translations=[BIASES],
    rotary=any_scaling(own=("llama3", SCALING)),
    unbiased=unbiased,
    ignored=("model.layers.*.self_attn.rotary_emb.inv_freq",),
)


SEED_OSS = decoder_conversion(
    "SeedOssForCausalLM",
    SeedOSSModel,
    SeedOSSConfig,
    rows=rows,
    fields=[
        *decoder_fields(num_key_value_heads=8, head_dim=128, max_position_embeddings=524288, attention_dropout=0.1),
        Field("attention_bias", "add_qkv_bias", True),
        Field("residual_dropout", "hidden_dropout", 0.1),
    ],
    only={"model_type": "seed_oss", "hidden_act": "silu", "attention_out_bias": False, "mlp_bias": False},
)


def _rotated(hf: Config) -> dict[str, Any]:
    every = hf.get("no_rope_layer_interval", 4)
    rotated = hf.get("no_rope_layers") or [(layer + 1) % every for layer in range(hf["num_hidden_layers"])]
    return {"no_rope_freq": [int(not flag) for flag in rotated]}


SMOLLM3 = decoder_conversion(
    "SmolLM3ForCausalLM",
    SmolLM3Model,
    SmolLM3Config,
    rows=rows,
    fields=decoder_fields(
        head_dim=DERIVED, num_key_value_heads=4, max_position_embeddings=32768, tie_word_embeddings=True
    ),
    only={"model_type": "smollm3", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    | {"use_sliding_window": False},
    translations=[Translation(_rotated, lambda own: {"no_rope_layers": rotated_layers(own)})],
    theta=2_000_000.0,
)
