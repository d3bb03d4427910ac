# SPDX-License-Identifier: Apache-2.0
"""The conversion of Qwen 2 and 2.5."""

from typing import Any

from nemo2.models.conversion.decoder import decoder_conversion, rows
from nemo2.models.conversion.settings import (
    DERIVED,
    FULL,
    SLIDING,
    Config,
    Translation,
    decoder_fields,
    layer_types,
    pattern_of,
    size_of,
    window_of,
)
from nemo2.models.qwen2 import Qwen2Config, Qwen2Model

_FIELDS = decoder_fields(head_dim=DERIVED, num_key_value_heads=32, max_position_embeddings=32768)
_ONLY = {"model_type": "qwen2", "hidden_act": "silu"}


def _windows(hf: Config) -> dict[str, Any]:
    """nemo2's settings for ``sliding_window``, which applies to the layers from ``max_window_layers`` on if
    ``use_sliding_window`` is set."""
    if not hf.get("use_sliding_window") or hf.get("sliding_window", 4096) is None:
        return {}
    first, count = hf.get("max_window_layers", 28), hf["num_hidden_layers"]
    types = hf.get("layer_types") or [SLIDING if layer >= first else FULL for layer in range(count)]
    if SLIDING not in types:
        return {}
    return {
        "window_size": window_of(hf.get("sliding_window", 4096)),
        "window_attn_skip_freq": pattern_of(hf, types),
        # Transformer Engine supports windows with context parallelism only by all-to-all.
        "cp_comm_type": "a2a",
    }


def _windows_of(ours: Any) -> dict[str, Any]:
    types = layer_types(ours)
    return {
        "use_sliding_window": SLIDING in types,
        "sliding_window": size_of(ours.window_size),
        "max_window_layers": types.index(SLIDING) if SLIDING in types else len(types),
        "layer_types": types,
    }


WINDOWS = Translation(_windows, _windows_of)
QWEN2 = decoder_conversion(
    "Qwen2ForCausalLM",
    Qwen2Model,
    Qwen2Config,
    rows=rows,
    fields=_FIELDS,
    only=_ONLY,
    translations=[WINDOWS],
    biased=("add_qkv_bias",),
)
