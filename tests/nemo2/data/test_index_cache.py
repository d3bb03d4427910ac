# SPDX-License-Identifier: Apache-2.0
"""The cache of sample indices, as a stranger or a crash may have left it. Megatron-Core alone is first shown to fall for it."""

import os
import shutil
import stat
from pathlib import Path

import numpy as np
import pytest

from nemo2.base.errors import DataError
from nemo2.data.index_cache import DamagedIndex, guarded, private_directory
from support.foreign_checkpoints import Bomb
from support.small_corpora import corpus, first_samples


def as_npy(path: Path, bomb: Bomb) -> None:
    """An array file whose header is numpy's, and whose contents are a pickle."""
    array = np.empty(1, dtype=object)
    array[0] = bomb
    with open(path, "wb") as file:
        np.save(file, array, allow_pickle=True)


@pytest.fixture
def built(tmp_path):
    """A corpus with its cache; the samples that it gave."""
    prefix = corpus(tmp_path / "a")
    first = first_samples(prefix)
    (cache,) = (tmp_path / "index_cache").iterdir()
    return prefix, cache, first


def index(cache: Path, kind: str = "sample") -> Path:
    (file,) = cache.glob(f"*-{kind}_index.npy")
    return file


def test_the_cache_is_this_users_own_and_each_file_has_its_hash(built):
    prefix, cache, first = built
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    arrays = sorted(path.name for path in cache.glob("*.npy"))
    assert len(arrays) == 3
    assert sorted(path.name for path in cache.glob("*.sha256")) == [f"{name}.sha256" for name in arrays]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in cache.glob("*.npy"))
    assert not list(cache.glob(".*")), "something unfinished is left"
    before = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
    assert first_samples(prefix) == first
    assert before == {path: path.stat().st_mtime_ns for path in cache.iterdir()}, "a good cache was built again"


@pytest.mark.parametrize("with_hash", [False, True])
def test_a_pickle_in_the_cache_is_not_run_and_megatron_core_alone_would_run_it(built, tmp_path, caplog, with_hash):
    prefix, cache, first = built
    mark, file = tmp_path / "mark", index(cache)
    as_npy(file, Bomb(mark))
    if with_hash:  # whoever can put a file there can hash it
        import hashlib

        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        file.with_name(file.name + ".sha256").write_text(f"{digest}  {file.name}\n")
    bare = tmp_path / "bare"
    shutil.copytree(cache, bare)
    with pytest.raises(DamagedIndex), guarded(str(cache), by_hash=False):
        np.load(file, allow_pickle=True, mmap_mode="r")
    assert first_samples(prefix) == first
    assert not mark.exists()
    assert file.name in caplog.text and "nemo2 builds it again" in caplog.text
    np.load(index(bare), allow_pickle=True, mmap_mode=None)  # as Megatron-Core 0.16 does
    assert mark.exists(), "the test's bomb is none"
    mark.rmdir()
    assert first_samples(prefix) == first and not mark.exists()


@pytest.mark.parametrize("kind", ["document", "sample", "shuffle"])
@pytest.mark.parametrize("harm", ["empty", "truncated", "flipped", "garbage", "without hash"])
def test_a_damaged_index_is_built_again_and_that_is_said(built, caplog, kind, harm):
    prefix, cache, first = built
    file = index(cache, kind)
    content = file.read_bytes()
    if harm == "without hash":
        file.with_name(file.name + ".sha256").unlink()
    else:
        flipped = content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]
        file.write_bytes({"empty": b"", "truncated": content[:-100], "flipped": flipped, "garbage": b"x" * 400}[harm])
    assert first_samples(prefix) == first
    assert str(file) in caplog.text and "nemo2 builds it again" in caplog.text
    assert file.read_bytes() == content


def test_an_index_that_is_a_link_or_a_pipe_is_refused_by_name(built):
    prefix, cache, _ = built
    file = index(cache)
    elsewhere = cache.parent / "elsewhere"
    file.rename(elsewhere)
    for make in (lambda: file.symlink_to(elsewhere), lambda: os.mkfifo(file)):
        make()
        with pytest.raises(DataError, match=rf"{file.name} is not a regular file.*Remove it"):
            first_samples(prefix)
        file.unlink()


def test_a_crash_while_an_index_is_written_leaves_no_half_of_it(built, monkeypatch):
    prefix, cache, first = built
    shutil.rmtree(cache)
    write_array = np.lib.format.write_array

    def dies(file, array, **kwargs):
        file.write(b"half of it")
        raise OSError("No space left on device")

    monkeypatch.setattr(np.lib.format, "write_array", dies)
    with pytest.raises(DataError, match=rf"{cache}/.*\.npy can't be written \(No space left on device\)"):
        first_samples(prefix)
    assert not list(cache.glob("*.npy*")) and not list(cache.glob(".*"))
    monkeypatch.setattr(np.lib.format, "write_array", write_array)
    assert first_samples(prefix) == first


def test_a_cache_folder_that_is_a_link_or_open_to_others_is_refused_or_closed(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / f"key-u{os.getuid()}").symlink_to(tmp_path / "theirs")
    with pytest.raises(DataError, match="is a link"):
        private_directory(tmp_path, "key")
    assert not list((tmp_path / "theirs").iterdir())
    (tmp_path / f"open-u{os.getuid()}").mkdir()
    (tmp_path / f"open-u{os.getuid()}").chmod(0o777)
    assert stat.S_IMODE(private_directory(tmp_path, "open").stat().st_mode) == 0o700


def test_a_cache_folder_of_another_user_is_refused(tmp_path):
    if os.getuid() != 0:
        pytest.skip("only root can make one")
    folder = tmp_path / "key-u0"
    folder.mkdir()
    os.chown(folder, 12345, -1)
    with pytest.raises(DataError, match="belongs to another user"):
        private_directory(tmp_path, "key")


def test_numpy_is_as_it_was_afterwards(tmp_path):
    load, save = np.load, np.save
    with guarded(str(tmp_path), by_hash=True):
        assert np.load is not load
        outside = tmp_path.parent / "outside.npy"
        np.save(outside, np.ones(3))
        assert np.load(outside).sum() == 3
    assert np.load is load and np.save is save


def after_rank_0_has_put_a_pickle_there(prefix, cache):
    import torch.distributed as dist

    if dist.get_rank() == 0:
        as_npy(index(Path(cache)), Bomb(Path(cache).parent.parent / "mark"))
    dist.barrier()
    return first_samples(prefix)


def test_all_ranks_read_what_rank_0_has_built_again(built, run_on_ranks, tmp_path):
    prefix, cache, first = built
    assert run_on_ranks(after_rank_0_has_put_a_pickle_there, 2, prefix, str(cache)) == [first] * 2
    assert not (tmp_path / "mark").exists()
