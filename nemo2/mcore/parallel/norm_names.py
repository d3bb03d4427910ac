# SPDX-License-Identifier: Apache-2.0
"""The names under which norms are stored, for any kind of layers.

Transformer Engine fuses a norm with the linear layer after it, and stores it as a part of that layer. In plain layers
the norm is a separate module. Megatron-Core stores the norms of plain layers under Transformer Engine's names too,
except those of latent attention. It names a norm before experts as if it were fused, although nothing is fused with it
(0.16 to 0.19, ``sharded_state_dict_keys_map`` in its layer specs). nemo2's checkpoints have Transformer Engine's names
throughout.
"""

from collections.abc import Collection
from typing import Optional

_ALONE_AND_FUSED = (
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
    ("self_attention.q_layernorm.", "self_attention.linear_q_up_proj.layer_norm_"),
    ("self_attention.kv_layernorm.", "self_attention.linear_kv_up_proj.layer_norm_"),
)
"""A norm's name as a separate module, and as a part of the linear layer after it. A transformer layer's name precedes
both."""
_BEFORE_EXPERTS, _AS_IF_FUSED = _ALONE_AND_FUSED[1]
_ROUTER = "mlp.router.weight"


def renamed_norms(stored: Collection[str]) -> dict[str, str]:
    """Transformer Engine's names, by the names in ``stored`` that differ.

    Args:
        stored: All names of a chunk or of a checkpoint, including those of the optimizer's state.
    """
    names = {}
    for name in stored:
        for alone, fused in _ALONE_AND_FUSED:
            layer, end = _split(name, alone)
            if layer is not None and f"{_of_model(layer)}{fused.removesuffix('layer_norm_')}weight" in stored:
                names[name] = f"{layer}{fused}{end}"
        layer, end = _split(name, _AS_IF_FUSED)
        if layer is not None and _of_model(layer) + _ROUTER in stored:
            names[name] = f"{layer}{_BEFORE_EXPERTS}{end}"
    return names


def module_of_key(key: str) -> str:
    """The full name, in plain layers, of the module that a tensor belongs to, from the tensor's key in a checkpoint
    (without "module.")."""
    for alone, fused in _ALONE_AND_FUSED:
        layer, end = _split(key, fused) if fused.endswith("_") else (None, "")
        if layer is not None:
            return f"{layer}{alone.rstrip('.')}"
    return key.rpartition(".")[0].replace(".experts.experts.", ".experts.")


def _split(name: str, norm: str) -> tuple[Optional[str], str]:
    """The layer's name and "weight" or "bias", if the name is this norm's."""
    layer, separator, end = name.rpartition(f".{norm}")
    return (f"{layer}.", end) if separator and end in ("weight", "bias") else (None, "")


def _of_model(layer: str) -> str:
    """The layer's name in the model, which follows the name of a part of the optimizer's state."""
    return layer[max(0, layer.find("module.")) :] if layer.startswith("optimizer.") else layer
