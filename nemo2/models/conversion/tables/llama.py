# SPDX-License-Identifier: Apache-2.0
"""The conversion of Llama 2, 3, 3.1 and 3.2, Code Llama."""

from typing import Any

from nemo2.models.conversion.decoder import BIASES, decoder_conversion, rows, unbiased
from nemo2.models.conversion.positions import any_scaling
from nemo2.models.conversion.settings import NEEDED, decoder_fields
from nemo2.models.llama import Llama31Config, LlamaConfig, LlamaModel

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
