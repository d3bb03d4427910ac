# SPDX-License-Identifier: Apache-2.0
"""What Transformer Engine is asked for, by stand-ins with the signatures of its versions."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from nemo2.overlap.userbuffers import start_userbuffers

Calls = list[dict[str, Any]]


@pytest.fixture(params=["1.9", "2.8", "2.20"])
def transformer_engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Calls]:
    """``initialize_ub`` of module/base.py at these tags: parameters, order, defaults."""
    calls: Calls = []

    def older(
        shape: list,
        tp_size: int,
        use_fp8: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        ub_cfgs: Any = None,
        bootstrap_backend: Any = None,
    ) -> None:
        calls.append(dict(locals()))

    def newer(
        shape: list,
        tp_size: int,
        use_fp8: bool = False,
        quantization_modes: Any = None,
        dtype: torch.dtype = torch.bfloat16,
        ub_cfgs: Any = None,
        bootstrap_backend: Any = None,
    ) -> None:
        calls.append(dict(locals()))

    def newest(
        shape: list,
        tp_size: int,
        use_fp8: bool = False,
        quantization_modes: Any = None,
        dtype: torch.dtype = torch.bfloat16,
        ub_cfgs: Any = None,
        bootstrap_backend: Any = None,
        with_cublasmp: bool = False,
    ) -> None:
        calls.append(dict(locals()))

    base: Any = ModuleType("transformer_engine.pytorch.module.base")
    base.initialize_ub = {"1.9": older, "2.8": newer, "2.20": newest}[request.param]
    base.UserBufferQuantizationMode = SimpleNamespace(FP8="fp8", NONE="none")
    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.module"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    return request.param, calls


ARGUMENTS: dict[str, Any] = {
    "tokens": 4096,
    "hidden_size": 8192,
    "tensor_parallel": 4,
    "dtype": torch.float16,
    "settings": {"qkv_fprop": {"num_sm": 2}},
    "bootstrap_backend": "nccl",
}


@pytest.mark.parametrize(
    ("fp8", "mixed", "modes"),
    [(False, False, ["none"]), (True, False, ["fp8"]), (True, True, ["fp8", "none"]), (False, True, ["none"])],
)
def test_every_version_is_asked_in_its_own_words(
    transformer_engine: tuple[str, Calls], fp8: bool, mixed: bool, modes: list[str]
) -> None:
    version, calls = transformer_engine
    start_userbuffers(**ARGUMENTS, fp8=fp8, some_layers_in_16_bits=mixed)
    [call] = [{key: value for key, value in call.items() if key != "calls"} for call in calls]
    assert (call["shape"], call["tp_size"], call["dtype"]) == ([4096, 8192], 4, torch.float16)
    assert (call["ub_cfgs"], call["bootstrap_backend"]) == ({"qkv_fprop": {"num_sm": 2}}, "nccl")
    if version == "1.9":
        assert call["use_fp8"] is fp8
    else:
        assert call["quantization_modes"] == modes and call["use_fp8"] is False
    assert call.get("with_cublasmp", False) is False
