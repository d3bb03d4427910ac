# SPDX-License-Identifier: Apache-2.0
"""Tensors read straight from checkpoint files are what torch's own reader gives, whatever part is asked for."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from nemo2.checkpoint.reading import DirectReader, _read_into
from nemo2.checkpoint.shards import Shard, load_shards

TENSORS = {
    "float": torch.arange(5 * 6 * 7, dtype=torch.float32).view(5, 6, 7),
    "half": torch.arange(24, dtype=torch.bfloat16).view(4, 6),
    "long": torch.arange(12).view(3, 4) - 5,
    "flags": torch.tensor([True, False, True]),
    "number": torch.tensor(3.25),
    "nothing": torch.empty(0, 4),
    "columns": torch.arange(20, dtype=torch.float32).view(4, 5).t(),
}

# Torch says on every call that it was told to work without ranks.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture
def folder(tmp_path) -> Path:
    dcp.save(dict(TENSORS), checkpoint_id=str(tmp_path), no_dist=True)
    return tmp_path


def torch_loads() -> Any:
    """Counts how many archives torch unpacks itself."""
    return mock.patch.object(torch, "load", wraps=torch.load)


def test_whole_tensors_are_what_was_saved_and_torch_unpacks_only_what_is_laid_out_differently(folder):
    found = {name: torch.full_like(value, 1, memory_format=torch.contiguous_format) for name, value in TENSORS.items()}
    with torch_loads() as loads:
        dcp.load(found, storage_reader=DirectReader(folder), no_dist=True)
    for name, value in TENSORS.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
    assert loads.call_count == 1, "only `columns`, whose bytes stand column by column"


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("float", (slice(1, 3), slice(0, 6), slice(0, 7))),
        ("float", (slice(2, 3), slice(1, 4), slice(0, 7))),
        ("float", (slice(4, 5), slice(5, 6), slice(2, 6))),
        ("float", (slice(1, 4), slice(2, 4), slice(3, 7))),
        ("half", (slice(0, 4), slice(1, 3))),
        ("half", (slice(2, 3), slice(1, 6))),
        ("columns", (slice(1, 4), slice(2, 3))),
        ("flags", (slice(1, 3),)),
        ("number", ()),
    ],
)
@pytest.mark.parametrize("target", ["rows", "columns", "float64"])
def test_a_part_is_read_into_whatever_it_is_wanted_in(folder, name, place, target):
    whole = TENSORS[name]
    expected = whole[place]
    into = torch.zeros(expected.shape, dtype=torch.float64 if target == "float64" else whole.dtype)
    if target == "columns" and expected.dim() > 1:
        into = torch.zeros(expected.shape[::-1], dtype=whole.dtype).permute(*reversed(range(expected.dim())))
    shard = Shard(
        key=name,
        tensor=into,
        offset=tuple(part.start for part in place),
        global_shape=tuple(whole.shape),
    )
    load_shards([shard], folder)
    assert torch.equal(into, expected.to(into.dtype))


def test_a_file_that_ends_too_early_is_an_error(folder):
    [file] = folder.glob("*.distcp")
    found = {"float": torch.zeros_like(TENSORS["float"])}
    reader = DirectReader(folder)
    with mock.patch("nemo2.checkpoint.reading._read_into", side_effect=EOFError(f"{file} ends at byte 7")):
        with pytest.raises(CheckpointException, match="ends at byte 7"):
            dcp.load(found, storage_reader=reader, no_dist=True)
    with open(file, "r+b") as stream:
        stream.truncate(file.stat().st_size // 2)
    with pytest.raises(CheckpointException):
        dcp.load(dict(TENSORS), storage_reader=DirectReader(folder), no_dist=True)


def test_bytes_that_are_missing_are_noticed_when_they_are_read(tmp_path):
    file = tmp_path / "short"
    file.write_bytes(b"\1" * 10)
    with pytest.raises(EOFError, match=r"short ends at byte 10, but more bytes were written"):
        _read_into(str(file), 4, torch.zeros(2))
