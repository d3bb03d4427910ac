# SPDX-License-Identifier: Apache-2.0
"""The attention backends that a version itself selects for other settings, with flash-attn installed.

Of cuDNN the kernels' own word is missing, which is taken for a yes: what remains refused is refused by the version's Python code.
"""

import contextlib
import importlib
import sys
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import torch
from packaging.version import Version

from tests.transformer_engine.kernels import gpu

NAMES = ("flash", "fused", "unfused")
_PACKED = {"qkv_layout": "thd_thd_thd", "attn_mask_type": "padding_causal"}
_CP = {"context_parallel": True, "cp_size": 2}
BESIDE: dict[str, dict[str, Any]] = {
    "a causal mask": {},
    "a window": {"window_size": (16, 0)},
    "a learnt sink": {"softmax_type": "learnable"},
    "a bias": {"core_attention_bias_type": "post_scale_bias", "core_attention_bias_shape": "1hss"},
    "a mask of one's own": {"attn_mask_type": "arbitrary"},
    "packed sequences": _PACKED,
    "dropout": {"attention_dropout": 0.1},
    "heads of 256": {"head_dim_qk": 256, "head_dim_v": 256},
    "heads of 12": {"head_dim_qk": 12, "head_dim_v": 12},
    "heads of 192, values of 128": {"head_dim_qk": 192, "head_dim_v": 128},
    "fp32": {"qkv_dtype": torch.float32},
    "deterministic": {"deterministic": True},
    "attention in fp8": {"fp8": True},
    "two context-parallel ranks, a ring": _CP | {"cp_comm_type": "p2p"},
    "two context-parallel ranks, gathered": _CP | {"cp_comm_type": "all_gather"},
    "two context-parallel ranks, all-to-all": _CP | {"cp_comm_type": "a2a"},
    "two context-parallel ranks, packed": _CP | {"cp_comm_type": "p2p"} | _PACKED,
}


def backends() -> dict[str, list[str] | None]:
    """The backends that remain on a Hopper GPU, by other settings. None: the version has no such attention."""
    utils = next(one for name, one in list(sys.modules.items()) if _has_it(name, one))
    flash: Any = utils.FlashAttentionUtils
    newest = getattr(flash, "max_version", Version("2.7.3"))
    flash.is_installed, flash.version = True, newest
    for name in [one for one in vars(flash) if one.startswith("v2_") and one.endswith("plus")]:
        setattr(flash, name, True)
    with gpu(9, 0):
        _cudnn_agrees(utils)
        return {beside: _left(utils, changes) for beside, changes in BESIDE.items()}


def _cudnn_agrees(utils: Any) -> None:
    extension: Any = sys.modules["transformer_engine_torch"]
    constants: Any = importlib.import_module("transformer_engine.pytorch.cpp_extensions.fused_attn")
    kinds = constants.FusedAttnBackend
    long = kinds["F16_arbitrary_seqlen"] if isinstance(kinds, dict) else kinds.F16_arbitrary_seqlen

    def answer(*args: Any, **kwargs: Any) -> Any:
        return (long, "") if hasattr(utils, "_get_fused_attn_backend") else long

    extension.get_fused_attn_backend = answer
    for owner in (utils, getattr(utils, "tex", extension)):
        with contextlib.suppress(AttributeError):
            owner.get_fused_attn_backend = answer


def _left(utils: Any, changes: dict[str, Any]) -> list[str] | None:
    known = {one.name for one in fields(utils.AttentionParams)}
    if unknown := changes.keys() - known - {"cp_comm_type", "cp_size"}:
        assert unknown == {"softmax_type"}, unknown
        return None
    plain = {"qkv_layout": "sbhd_sbhd_sbhd", "attn_mask_type": "causal", "max_seqlen_q": 256, "max_seqlen_kv": 256}
    plain |= {"core_attention_bias_shape": None}
    given = (
        plain | {"num_heads": 8, "num_gqa_groups": 8} | {name: one for name, one in changes.items() if name in known}
    )
    if given.get("fp8"):
        recipes: Any = importlib.import_module("transformer_engine.common.recipe")
        recipe = recipes.DelayedScaling(fp8_dpa=True)
        given |= {"fp8_meta": {"recipe": recipe, "local_recipes": [recipe]}}
    shape = next(one for one in fields(utils.AttentionParams) if one.name == "core_attention_bias_shape")
    if given["core_attention_bias_shape"] and "uple" in str(shape.type):  # 2.20 takes the sizes
        given["core_attention_bias_shape"] = (1, 8, 256, 256)
    found = utils.get_attention_backend(utils.AttentionParams(**given))
    return [name for name, left in zip(NAMES, found[-1], strict=True) if left]


def _has_it(name: str, module: Any) -> bool:
    here = getattr(module, "__name__", "") == name and name.startswith("transformer_engine.pytorch")
    return here and hasattr(module, "AttentionParams") and "FlashAttentionUtils" in vars(module) and _owns(module, name)


def _owns(module: SimpleNamespace | Any, name: str) -> bool:
    return getattr(module.AttentionParams, "__module__", None) == name
