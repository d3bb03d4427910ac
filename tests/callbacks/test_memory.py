# SPDX-License-Identifier: Apache-2.0
"""MemoryMonitor on a CPU's real figures and a GPU's made-up ones; MemoryProfileCallback with a stand-in for the allocator."""

import errno
import logging
import os
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from nemo2.base.backend import get_backend
from nemo2.base.errors import ConfigError
from nemo2.callbacks import MemoryMonitor, MemoryProfileCallback, memory_monitor
from support.one_weight import OneWeight, run

GIB = 2**30


def test_on_a_cpu_it_is_the_memory_of_the_process():
    (_, line), *_ = run(MemoryMonitor(), steps=3)
    resident = psutil.Process().memory_info().rss / GIB
    assert line["memory/allocated_gib"] == pytest.approx(resident, rel=0.2)
    assert line["memory/peak_gib"] >= 0.8 * resident
    assert set(line) == {"memory/allocated_gib", "memory/peak_gib"}


def test_the_peak_is_of_the_steps_since_the_last_line(monkeypatch):
    class Backend(type(get_backend())):
        name = "cuda"
        peak = 0

        def memory_figures(self) -> dict[str, int]:
            return {
                "allocated_bytes": GIB,
                "peak_bytes": self.peak,
                "reserved_peak_bytes": 4 * GIB,
                "capacity_bytes": 9,
            }

        def reset_peak_memory(self) -> None:
            self.peak = GIB

    class Grows(OneWeight):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            backend.peak = max(backend.peak, (3 if batch_idx < 3 else 2) * GIB)
            return super().training_step(batch, batch_idx)

    backend = Backend()
    monkeypatch.setattr(memory_monitor, "get_backend", lambda: backend)
    lines = [line for _, line in run(MemoryMonitor(), model=Grows())]
    assert [line["memory/peak_gib"] for line in lines] == [3, 2]
    assert lines[0]["memory/reserved_peak_gib"] == 4

    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"num_ooms": 2})
    (_, line), *_ = run(MemoryMonitor({"num_ooms": "ooms"}), steps=3)
    assert line == {"memory/ooms": 2.0}
    with pytest.raises(ConfigError, match="torch has no memory statistic 'num_oom'.*did you mean 'num_ooms'"):
        run(MemoryMonitor({"num_oom": "ooms"}), steps=3)


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: calls.append(options))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_text("snapshot"))
    return calls


@pytest.mark.parametrize("fails", [False, True])
def test_the_snapshot_is_written_once_at_the_end_or_at_a_failure(allocator, tmp_path, fails):
    class Model(OneWeight):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            if fails and batch_idx == 1:
                raise torch.OutOfMemoryError("as meant")
            return super().training_step(batch, batch_idx)

    callback = MemoryProfileCallback(dir=tmp_path / "made", warn_cycles=False, max_entries=7)
    if fails:
        with pytest.raises(torch.OutOfMemoryError):
            run(callback, model=Model())
    else:
        run(callback, steps=2)
    assert (tmp_path / "made" / "rank-0.pickle").read_text() == "snapshot"
    assert allocator == [{"max_entries": 7}, {"enabled": None}]


def test_a_snapshot_that_finds_no_space_is_a_warning(allocator, caplog, monkeypatch, tmp_path):
    def full(path: str) -> None:
        Path(path).write_text("a part")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", full)
    run(MemoryProfileCallback(dir=tmp_path, warn_cycles=False), steps=1)
    assert "rank-0.pickle was not written (No space left on device)" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_other_ranks_record_nothing_and_those_that_the_run_lacks_are_told(allocator, caplog, tmp_path):
    with caplog.at_level(logging.WARNING, logger="nemo2"):
        run(MemoryProfileCallback(dir=tmp_path, warn_cycles=False, ranks=[1]), steps=1)
    assert "MemoryProfileCallback.ranks=[1]: this run has only 1 ranks" in caplog.text
    assert allocator == []
    assert list(tmp_path.iterdir()) == []


def test_without_a_gpu_nothing_is_recorded_and_that_is_said(caplog, tmp_path):
    with caplog.at_level(logging.WARNING, logger="nemo2"):
        run(MemoryProfileCallback(dir=tmp_path / "made"), steps=1)
    assert "records the memory of GPUs, but this machine has no GPU" in caplog.text
    assert not (tmp_path / "made").exists()
