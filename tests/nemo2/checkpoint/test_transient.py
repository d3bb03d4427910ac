# SPDX-License-Identifier: Apache-2.0
"""What a network file system fails at for a moment is tried again, and what it did without saying so is found done."""

import builtins
import errno
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nemo2.checkpoint import directory, reading, writer_process
from nemo2.checkpoint.directory import finished, problems, publish, read_manifest, sha256
from nemo2.training.run_dir.metrics import JSONLLogger
from nemo2.training.run_dir.records import read_metrics
from support.saved_checkpoints import manifest, saved, written


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(writer_process.time, "sleep", lambda seconds: None)


def flaky(original: Callable[..., Any], number: int, *, times: int = 1, done: bool = False) -> Callable[..., Any]:
    """``original``, which fails at first with an error number; ``done``: after it has done its work."""
    left = [times]

    def call(*args: Any, **kwargs: Any) -> Any:
        if left[0]:
            left[0] -= 1
            if done:
                original(*args, **kwargs)
            raise OSError(number, os.strerror(number))
        return original(*args, **kwargs)

    return call


@pytest.mark.parametrize("done", [False, True], ids=["nothing happened", "it was renamed"])
def test_a_checkpoint_is_published_over_a_server_that_restarts(tmp_path, monkeypatch, done):
    monkeypatch.setattr(directory.os, "rename", flaky(os.rename, errno.ESTALE, done=done))
    publish(written(tmp_path / "step=1", 1), tmp_path / "step=1", manifest(1))
    monkeypatch.undo()
    assert [path.name for path, _ in finished(tmp_path)] == ["step=1"] and not problems(tmp_path / "step=1")


def test_a_rename_that_never_works_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(directory.os, "rename", flaky(os.rename, errno.ESTALE, times=100))
    with pytest.raises(OSError, match="[Ss]tale"):
        publish(written(tmp_path / "step=1", 1), tmp_path / "step=1", manifest(1))
    assert finished(tmp_path) == []


def test_a_flush_that_lost_data_is_not_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(directory.os, "fsync", flaky(os.fsync, errno.EIO))
    with pytest.raises(OSError, match=r"[Ii]nput/output"):
        directory._fsync(tmp_path)
    monkeypatch.setattr(directory.os, "fsync", flaky(os.fsync, errno.ESTALE))
    directory._fsync(tmp_path)


def test_manifests_hashes_and_tensors_are_read_again(tmp_path, monkeypatch):
    shard = saved(tmp_path / "step=1", 1, "tensors") / "weights" / "part"
    expected = sha256(shard)
    for action in (lambda: sha256(shard) == expected, lambda: read_manifest(tmp_path / "step=1") is not None):
        with monkeypatch.context() as patched:
            patched.setattr(builtins, "open", flaky(open, errno.EIO))
            assert action()
    target = torch.zeros(3, dtype=torch.uint8)
    with monkeypatch.context() as patched:
        patched.setattr(reading.os, "preadv", flaky(os.preadv, errno.EIO, times=3))
        reading._read_into(str(shard), 1, target)
    assert bytes(target.tolist()) == b"ens"


def test_a_line_of_metrics_is_written_once_though_the_disk_stumbled(tmp_path):
    logger = JSONLLogger(str(tmp_path))
    logger.log_metrics({"reduced_train_loss": 2.0}, step=0)
    file: Any = logger._file

    class Raw:
        """The file below its buffers, which fails twice."""

        left = 2

        def write(self, data: bytes) -> int:
            if self.left:
                self.left -= 1
                raise OSError(errno.ESTALE, "Stale file handle")
            return os.write(file.fileno(), data)

    import io

    class Stumbling(io.RawIOBase):
        raw = Raw()

        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            return self.raw.write(bytes(data))

    logger._file = io.TextIOWrapper(io.BufferedWriter(Stumbling()), line_buffering=True)
    logger.log_metrics({"reduced_train_loss": 1.0}, step=1)
    logger.log_metrics({"reduced_train_loss": 0.5}, step=2)
    logger._file.close()
    file.close()
    assert [record["reduced_train_loss"] for record in read_metrics(tmp_path)] == [2.0, 1.0, 0.5]
