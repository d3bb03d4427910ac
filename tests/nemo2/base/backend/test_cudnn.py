# SPDX-License-Identifier: Apache-2.0
"""Which cuDNN Transformer Engine is pointed to, and what tells that two are loaded."""

import importlib
import sys
from pathlib import Path

import pytest

from nemo2.base.backend import cudnn


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an installed cuDNN, beside a Transformer Engine."""
    folder = tmp_path / "nvidia" / "cudnn"
    (folder / "lib").mkdir(parents=True)
    (folder / "lib" / "libcudnn.so.9").touch()
    for name in [name for name in sys.modules if name.split(".")[0] == "nvidia"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    importlib.invalidate_caches()
    monkeypatch.setattr(cudnn, "has", lambda module: module == "transformer_engine")
    for name in cudnn.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDNN_HOME", "")
    return folder


def home() -> str:
    import os

    cudnn.share_cudnn()
    return os.environ["CUDNN_HOME"]


def test_transformer_engine_loads_the_cudnn_of_torchs_packages(package: Path) -> None:
    assert home() == str(package)


@pytest.mark.parametrize("variable", cudnn.VARIABLES)
def test_a_users_choice_stands(package: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "/opt/cudnn")
    assert home() != str(package)


def test_nothing_is_set_without_transformer_engine_or_the_package(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (package / "lib" / "libcudnn.so.9").unlink()
    assert home() == ""
    (package / "lib" / "libcudnn.so.9").touch()
    monkeypatch.setattr(cudnn, "has", lambda module: False)
    assert home() == ""


def test_two_loaded_versions_are_seen_in_the_maps_of_a_process() -> None:
    maps = (
        "7f0 r-xp 0 fd:01 1 /usr/lib/x86_64-linux-gnu/libcudnn.so.9.14.0\n"
        "7f1 r-xp 0 fd:01 2 /usr/lib/x86_64-linux-gnu/libcudnn_graph.so.9.14.0\n"
        "7f2 r-xp 0 fd:01 3 /opt/nvidia/cudnn/lib/libcudnn.so.9\n"
        "7f3 rw-p 0 fd:01 3 /opt/nvidia/cudnn/lib/libcudnn.so.9\n"
    )
    assert cudnn.loaded_cudnn(maps) == [
        "/opt/nvidia/cudnn/lib/libcudnn.so.9",
        "/usr/lib/x86_64-linux-gnu/libcudnn.so.9.14.0",
    ]
