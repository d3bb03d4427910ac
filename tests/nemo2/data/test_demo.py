# SPDX-License-Identifier: Apache-2.0
"""StdlibDataModule: nothing happens until data is asked for, and then only once."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fiddle as fdl
import pytest
import torch

from nemo2.config import Config
from nemo2.data.demo import StdlibDataModule

SMALL: dict[str, Any] = {"vocab_size": 400, "max_bytes": 400_000, "seq_length": 64}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stdlib")


def module_in(directory: Path, **settings: Any) -> StdlibDataModule:
    data = StdlibDataModule(str(directory), **SMALL | settings)
    data.trainer = SimpleNamespace(  # pyright: ignore[reportAttributeAccessIssue]
        max_steps=3, limit_val_batches=2, limit_test_batches=0, val_check_interval=2, strategy=None, global_step=0
    )
    return data


def test_configuring_and_building_touch_nothing(directory: Path) -> None:
    place = directory / "untouched"
    fdl.build(Config(StdlibDataModule, directory=str(place)))
    assert not place.exists()


def test_samples_are_python_text_one_token_apart(directory: Path) -> None:
    data = module_in(directory)
    data.prepare_data()
    datasets = data.build_datasets(["train", "validation", "test"])
    sample = datasets["train"][0]
    assert sample["tokens"].shape == sample["labels"].shape == (64,)
    assert torch.equal(sample["tokens"][1:], sample["labels"][:-1])
    assert data.tokenizer.vocab_size == 400
    texts = "".join(data.tokenizer.ids_to_text(datasets["train"][i]["tokens"].tolist()) for i in range(20))
    assert "self" in texts and "def " in texts
    assert datasets["test"] is None


def test_there_is_enough_for_every_step_and_validation_and_they_share_no_file(directory: Path) -> None:
    data = module_in(directory, global_batch_size=8)
    datasets = data.build_datasets(["train", "validation"])
    assert len(datasets["train"]) >= 3 * 8
    assert len(datasets["validation"]) >= (3 // 2 + 1) * 2 * 8
    assert data.prepared.train != data.prepared.validation


@pytest.mark.slow
def test_the_cache_follows_nemos_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NEMO_DATASETS_CACHE", str(tmp_path / "cache"))
    prepared = StdlibDataModule(**SMALL).prepared
    assert Path(prepared.tokenizer).is_relative_to(tmp_path / "cache" / "stdlib")
    monkeypatch.delenv("NEMO_DATASETS_CACHE")
    monkeypatch.setenv("NEMO_HOME", str(tmp_path / "home"))
    assert Path(StdlibDataModule(**SMALL).prepared.train).is_relative_to(tmp_path / "home" / "datasets" / "stdlib")
