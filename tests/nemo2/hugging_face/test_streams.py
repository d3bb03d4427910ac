# SPDX-License-Identifier: Apache-2.0
"""Files written from stretches of others are those bytes, whoever copies them."""

import errno
import hashlib
import os
from pathlib import Path

import pytest
import torch

from nemo2.hugging_face import streams
from nemo2.hugging_face.streams import Computed, Copy, Planned, write_files


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "BLOCK", 1000)


def planned(folder: Path) -> tuple[Planned, bytes]:
    source = folder / "source"
    source.write_bytes(data := os.urandom(10_000))
    computed = Computed(1500, lambda: iter([torch.zeros(1000, dtype=torch.uint8), torch.zeros(500, dtype=torch.uint8)]))
    stretches = [b"head", Copy(str(source), 123, 4567), computed, Copy(str(source), 9000, 1000)]
    whole = b"head" + data[123:4690] + bytes(1500) + data[9000:]
    return Planned(path=folder / "made", stretches=stretches), whole


def test_the_bar_of_a_long_name_is_one_line_of_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    name = "Exporting llama_tiny--reduced_train_loss=6.5-step=11-consumed_samples=96-last"
    with streams.progress_bar(name, 123_456_789_000, show=True) as advance:
        advance(1_000_000_000)
    (line,) = {one for one in capsys.readouterr().err.splitlines() if one}
    assert line.startswith("Exporting llama_tiny") and "1.0/123.5 GB" in line and len(line) <= 80


@pytest.mark.parametrize("hashes", [False, True])
@pytest.mark.parametrize("refused_after", [None, 0, 2])
def test_the_bytes_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hashes: bool, refused_after: int | None
) -> None:
    """Also where the kernel doesn't copy between these file systems, or no further."""
    real, calls = os.copy_file_range, []

    def copy(*arguments: int) -> int:
        if refused_after is not None and len(calls) >= refused_after:
            raise OSError(errno.EXDEV, "other file system")
        calls.append(real(*arguments))
        return calls[-1]

    monkeypatch.setattr(os, "copy_file_range", copy)
    file, whole = planned(tmp_path)
    told: list[int] = []
    found = write_files([file], advance=told.append, hashes=hashes)
    assert file.path.read_bytes() == whole and sum(told) == len(whole)
    assert found == ({file.path: hashlib.sha256(whole).hexdigest()} if hashes else {})
    assert bool(calls) == (not hashes and refused_after != 0)


def test_groups_are_as_full_as_they_may_be_and_only_adjacent_copies_are_one() -> None:
    sizes = [3, 3, 4, 1, 20, 5]
    assert list(streams.grouped(sizes, int, most=10)) == [[3, 3, 4], [1], [20], [5]]
    assert list(streams.grouped([], int, most=10)) == [[]]
    copies = [Copy("a", 0, 4), Copy("a", 4, 2), Copy("a", 7, 1), Copy("b", 8, 1), b"x", Copy("b", 9, 1)]
    assert streams.merged(copies) == [Copy("a", 0, 6), *copies[2:]]


def test_a_source_that_ends_early_is_told(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"short")
    file = Planned(path=tmp_path / "made", stretches=[Copy(str(tmp_path / "source"), 2, 10)])
    with pytest.raises(EOFError, match="source ends at byte 5, and 7 more are needed"):
        write_files([file], advance=lambda _: None)


def test_a_full_disk_is_not_taken_for_another_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> int:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "copy_file_range", full)
    with pytest.raises(OSError, match="no space left"):
        write_files([planned(tmp_path)[0]], advance=lambda _: None)
