# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's switches of tensor-parallel overlap, which follow from the settings per GEMM.

Transformer Engine makes a buffer for every GEMM, set or not. A layer uses the buffer if a switch of the model's
configuration says so. Each switch controls several GEMMs:

| switch of ``model.config`` | GEMMs |
|---|---|
| ``tp_comm_overlap_ag`` | all that wait for a gather: qkv_fprop, fc1_fprop, proj_dgrad, fc2_dgrad |
| ``tp_comm_overlap_rs`` | proj_fprop, fc2_fprop, whose output is scattered |
| ``tp_comm_bulk_dgrad`` | qkv_dgrad, fc1_dgrad: during them the layer's input is gathered again |
| ``tp_comm_bulk_wgrad`` | qkv_wgrad, fc1_wgrad: during them the input's gradient is scattered |
| ``tp_comm_overlap_rs_dgrad`` | qkv_dgrad, fc1_dgrad scatter their own output, in place of both bulk exchanges |
| ``tp_comm_overlap_disable_qkv`` | turns off the gather of qkv_fprop and the scatter of qkv_dgrad's own output |
| ``tp_comm_overlap_disable_fc1`` | turns off the gather of fc1_fprop and the scatter of fc1_dgrad's own output |

Source: TELayerNormColumnParallelLinear and TELinear of megatron/core/extensions/transformer_engine.py, and Transformer
Engine's handling of their arguments (tests/transformer_engine).
"""

from collections.abc import Mapping
from typing import Any

from nemo2.mcore.overlap.tp_overlap_cfg import GATHERS, SCATTERS, settings_by_gemm

SWITCHES: dict[str, tuple[str, ...]] = {
    "tp_comm_overlap_ag": GATHERS,
    "tp_comm_overlap_rs": SCATTERS,
    "tp_comm_bulk_dgrad": ("qkv_dgrad", "fc1_dgrad"),
    "tp_comm_bulk_wgrad": ("qkv_wgrad", "fc1_wgrad"),
    "tp_comm_overlap_rs_dgrad": ("qkv_dgrad", "fc1_dgrad"),
    "tp_comm_overlap_disable_qkv": ("qkv_fprop", "qkv_dgrad"),
    "tp_comm_overlap_disable_fc1": ("fc1_fprop", "fc1_dgrad"),
}
"""The switches, and the GEMMs that each controls."""
_COLUMN = ("qkv", "fc1")
_CFG = "MegatronCommOverlapCallback.tp_comm_overlap_cfg"


def switches_of(settings: Any) -> dict[str, bool]:
    """The value that each switch needs for userbuffer settings. See `unswitchable` for settings that no switches can
    produce.

    ``settings`` as in `userbuffer_settings`: a GEMM of None is off, and a GEMM that a dict omits uses Transformer
    Engine's settings. None: all GEMMs use them.
    """
    requested = _Requested(settings)
    in_bulk = [layer for layer in _COLUMN if layer not in requested.scattered]
    gathered = any(map(requested.on, GATHERS))
    return {
        "tp_comm_overlap_ag": gathered,
        "tp_comm_overlap_rs": any(map(requested.on, SCATTERS)),
        "tp_comm_bulk_dgrad": any(requested.on(f"{layer}_dgrad") for layer in in_bulk),
        "tp_comm_bulk_wgrad": any(requested.on(f"{layer}_wgrad") for layer in in_bulk),
        "tp_comm_overlap_rs_dgrad": bool(requested.scattered),
        **{
            # The second term: if only one of two dgrads scatters, this switch alone keeps the other in bulk.
            f"tp_comm_overlap_disable_{layer}": (gathered and not requested.on(f"{layer}_fprop"))
            or (layer in in_bulk and bool(requested.scattered))
            for layer in _COLUMN
        },
    }


def unswitchable(settings: Any) -> list[str]:
    """Settings that would need their own switch, one sentence each."""
    requested = _Requested(settings)
    in_bulk = [layer for layer in _COLUMN if layer not in requested.scattered]
    problems = []
    for gemms, switch in (
        (("proj_dgrad", "fc2_dgrad"), "tp_comm_overlap_ag"),
        (SCATTERS, "tp_comm_overlap_rs"),
        ([f"{layer}_dgrad" for layer in in_bulk], "tp_comm_bulk_dgrad"),
        ([f"{layer}_wgrad" for layer in in_bulk], "tp_comm_bulk_wgrad"),
    ):
        off = [gemm for gemm in gemms if not requested.on(gemm)]
        if off and len(off) < len(gemms):
            on = next(gemm for gemm in gemms if requested.on(gemm))
            problems.append(
                f"{_CFG}.{off[0]}=None turns off one overlap, but {on} is on. One switch, model.config.{switch}, "
                "controls both. Set both, or set neither."
            )
    switched = switches_of(settings)
    if switched["tp_comm_overlap_ag"] and not requested.on("proj_dgrad") and not requested.on("fc2_dgrad"):
        on = next(gemm for gemm in GATHERS if requested.on(gemm))
        problems.append(
            f"{_CFG}.proj_dgrad=None and fc2_dgrad=None turn off two overlaps, but {on} is on. One switch, "
            "model.config.tp_comm_overlap_ag, controls all of them. Set both, or also turn off qkv_fprop and "
            "fc1_fprop."
        )
    for layer in requested.scattered:
        if switched["tp_comm_overlap_ag"] and not requested.on(f"{layer}_fprop"):
            problems.append(
                f"{_CFG}.{layer}_fprop=None turns off one overlap, but {layer}_dgrad scatters. One switch, "
                f"model.config.tp_comm_overlap_disable_{layer}, turns both off. Set {layer}_fprop, or set "
                f"{layer}_dgrad to a BulkOverlapCfg."
            )
    return problems


def left_out(settings: Any) -> list[str]:
    """GEMMs with settings that are off all the same, because their layer has one switch for two GEMMs and needs it
    off. One sentence each."""
    requested, switched = _Requested(settings), switches_of(settings)
    return [
        f"{_CFG}.{layer}_fprop is off, because {other}_dgrad scatters and {layer}_dgrad does not. To keep "
        f"{layer}_dgrad in bulk, nemo2 sets model.config.tp_comm_overlap_disable_{layer}=True, and this switch also "
        f"turns off the gather of {layer}_fprop."
        for layer, other in (_COLUMN, _COLUMN[::-1])
        if switched[f"tp_comm_overlap_disable_{layer}"]
        and requested.on(f"{layer}_fprop")
        and switched["tp_comm_overlap_ag"]
    ]


def contradictions(settings: Any, switched: Mapping[str, bool]) -> list[str]:
    """Switches with which a layer would use a buffer in another way than the buffer was made for, one sentence each.

    A switch that turns off more than the settings do is no contradiction.
    """
    problems = []
    for name, required in switches_of(settings).items():
        value = switched.get(name, required)
        harmless = value is (name.startswith("tp_comm_overlap_disable"))
        if value == required or (harmless and name != "tp_comm_overlap_rs_dgrad"):
            continue
        gemms = " and ".join(SWITCHES[name])
        problems.append(
            f"model.config.{name}={value} contradicts tp_comm_overlap_cfg, whose settings of {gemms} require "
            f"{required}. Leave model.config.{name} unset, and set {gemms} on "
            "MegatronCommOverlapCallback.tp_comm_overlap_cfg."
        )
    return problems


class _Requested:
    """Answers questions about userbuffer settings by GEMM."""

    def __init__(self, settings: Any) -> None:
        self._settings = settings_by_gemm(settings)
        self.scattered = [
            layer for layer in _COLUMN if (self._settings.get(f"{layer}_dgrad") or {}).get("method", "bulk") != "bulk"
        ]
        """Layers whose dgrad scatters its own output."""

    def on(self, gemm: str) -> bool:
        return gemm not in self._settings or self._settings[gemm] is not None
