# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest

from nemo2.errors import ConfigError
from nemo2.gpus import GENERATIONS, GIB, NAMES, gpu, parse_gpus, spread_over


@pytest.mark.parametrize(
    ("text", "name", "number"), [("H100x1152", "H100", 1152), ("h200", "H200", None), ("A100-80GBx8", "A100", 8)]
)
def test_gpus_are_named_with_or_without_their_number(text: str, name: str, number: Any) -> None:
    gpu, count = parse_gpus(text)
    assert (gpu.name, count) == (name, number) and gpu.memory > 70 * GIB


@pytest.mark.parametrize("text", ["H1000x8", "H100x0", "8", "H100x", ""])
def test_unknown_gpus_are_refused_with_those_there_are(text: str) -> None:
    with pytest.raises(ConfigError, match="must be one of V100-16"):
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
    ("devices", "number", "expected"), [(8, 1152, (144, 8)), (4, 64, (16, 4)), (8, 4, (1, 4)), (3, 16, (2, 8))]
)
def test_gpus_are_spread_over_whole_nodes(devices: int, number: int, expected: tuple[int, int]) -> None:
    class Trainer:
        num_nodes = 1

    trainer: Any = Trainer()
    trainer.devices = devices
    spread_over(trainer, number)
    assert (trainer.num_nodes, trainer.devices) == expected


def test_gpus_that_are_no_whole_nodes_are_refused() -> None:
    class Trainer:
        num_nodes, devices = 1, 8

    with pytest.raises(ConfigError, match="12 GPUs are not whole nodes of 8; use a multiple of 8"):
        spread_over(Trainer(), 12)
