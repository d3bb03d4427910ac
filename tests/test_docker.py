# SPDX-License-Identifier: Apache-2.0
"""The image's last step, which refuses a build that would fail a job; what the build is given."""

import importlib.util
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docker_check", ROOT / "docker" / "check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_package_of_the_base_that_was_replaced_fails_the_build(check, tmp_path):
    before = tmp_path / "before.txt"
    before.write_text(f"torch=={version('torch')}\n")
    assert check.replaced(before) == []
    before.write_text("torch==2.8.0a0+5228986c39.nv25.06\nflash_attn==2.7.4\n")
    assert [line.partition(" and is ")[0] for line in check.replaced(before)] == [
        "torch was 2.8.0a0+5228986c39.nv25.06",
        "flash_attn was 2.7.4",
    ]


@pytest.mark.parametrize(
    ("name", "there", "said"),
    [
        ("torch", "2.8.0a0+5228986c39.nv25.06", []),
        ("torch", "2.5.1", ["torch 2.5.1 is not >=2.7"]),
        ("transformer-engine", "2.4.0+3cd6870", []),
        ("transformer-engine", "1.13.0", ["transformer-engine 1.13.0 is not"]),
        ("megatron-core", None, ["megatron-core is missing"]),
    ],
)
def test_versions_are_held_to_nemo2_s_own_bounds(name, there, said, check, monkeypatch):
    real = check._installed
    monkeypatch.setattr(check, "_installed", lambda asked: there if asked == name else real(asked))
    found = check.out_of_range()
    assert len(found) == len(said) and all(one.startswith(start) for one, start in zip(found, said, strict=True))


def test_the_build_is_given_all_that_the_wheel_is_made_of():
    given = (ROOT / "docker" / "Dockerfile.dockerignore").read_text().split()
    for name in ("pyproject.toml", "README.md", "LICENSE", "nemo2", "recipes", "callbacks", "docker"):
        assert f"!{name}" in given and (ROOT / name).exists()
