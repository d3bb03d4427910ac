# SPDX-License-Identifier: Apache-2.0
"""Facts of a machine: which GPU its name tells."""

from typing import Optional

import pytest

from nemo2.overlap.facts import gpu_model, machine


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
def test_a_gpu_is_known_by_its_device_name(device_name: str, model: Optional[str]) -> None:
    assert gpu_model(device_name) == model


def test_a_machine_without_a_gpu_says_why_transformer_engine_is_not_used() -> None:
    gpu, missing = machine()
    assert gpu is None and missing is not None and "transformer_engine" in missing
