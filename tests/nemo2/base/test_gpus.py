# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest

from nemo2.base.errors import ConfigError
from nemo2.base.gpus import GENERATIONS, GIB, NAMES, gpu, model_of, parse_gpus


@pytest.mark.parametrize(
    ("text", "name", "number"),
    [
        ("H100x1152", "H100", 1152),
        ("8xH100", "H100", 8),
        ("16XA100-80GB", "A100", 16),
        ("2*rtx4090", "RTX4090", 2),
        ("h200", "H200", None),
        ("A100-80GBx8", "A100", 8),
    ],
)
def test_gpus_are_named_with_or_without_their_number(text: str, name: str, number: Any) -> None:
    gpu, count = parse_gpus(text)
    assert (gpu.name, count) == (name, number) and gpu.memory > 20 * GIB


@pytest.mark.parametrize("text", ["H1000x8", "8xH1000", "8", "8x", "8x8", "8xH100x8", "H100x", ""])
def test_unknown_gpus_are_refused_with_those_there_are(text: str) -> None:
    with pytest.raises(ConfigError, match="must be one of V100-16"):
        parse_gpus(text)


@pytest.mark.parametrize("text", ["H100x0", "0xH100", "0", "00"])
def test_no_gpus_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--gpus '{text}': the number of GPUs must be at least 1"):
        parse_gpus(text)


@pytest.mark.parametrize("name", NAMES)
def test_every_gpu_is_whole(name: str) -> None:
    one = gpu(name)
    assert one.name == name and one.generation in GENERATIONS
    assert 10 * GIB < one.memory < 300 * GIB
    assert ("fp8" in one.flops) == (one.capability >= (8, 9)) and ("fp4" in one.flops) == (one.capability >= (10, 0))
    assert one.rate("fp8") >= one.rate("bf16") > one.rate("fp32") > 1e13
    # A byte costs more the further it goes.
    assert one.hbm > one.nvlink > one.network > 1e9


@pytest.mark.parametrize(
    ("device_name", "model"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA L40S", "l40s"),
        ("Tesla T4", None),
        ("Something else", None),
    ],
)
def test_a_gpu_is_known_by_its_device_name(device_name: str, model: Any) -> None:
    assert model_of(device_name) == model
