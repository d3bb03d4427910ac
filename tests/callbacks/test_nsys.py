# SPDX-License-Identifier: Apache-2.0
"""Which steps CUDA's profiler is told to record, with a stand-in for the GPU that writes down what it is told."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo2.callbacks import NsysCallback
from support.one_weight import OneWeight, run


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of a GPU's profiler, in order."""
    calls: list[str] = []

    class Ranges:
        def __init__(self, record_shapes: bool) -> None:
            calls.append(f"operators, shapes {record_shapes}")

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: Any) -> None:
            calls.append("operators end")

    runtime = SimpleNamespace(
        cudaProfilerStart=lambda: calls.append("start"), cudaProfilerStop=lambda: calls.append("stop")
    )
    monkeypatch.setattr("nemo2.callbacks.nsys._has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("end"))
    monkeypatch.setattr(torch.autograd.profiler, "emit_nvtx", Ranges)
    return calls


def test_it_records_from_the_first_step_named_to_before_the_last(told):
    run(NsysCallback(start_step=2, end_step=4, gen_shape=True))
    assert told == [
        "start", "operators, shapes True", "step 2", "end", "step 3", "end", "operators end", "stop",
    ]  # fmt: skip


def test_a_rank_that_was_not_named_records_nothing(told):
    run(NsysCallback(start_step=0, end_step=2, ranks=[1]))
    assert told == []


@pytest.mark.parametrize("fails", [False, True])
def test_the_recording_ends_with_the_training_or_its_failure(told, fails):
    class Model(OneWeight):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            if fails and batch_idx == 1:
                raise RuntimeError("as meant")
            return super().training_step(batch, batch_idx)

    if fails:
        with pytest.raises(RuntimeError, match="as meant"):
            run(NsysCallback(start_step=0, end_step=10), model=Model())
    else:
        run(NsysCallback(start_step=0, end_step=10), steps=2)
    assert told[0] == "start"
    assert told[-2:] == ["operators end", "stop"]
    assert told.count("stop") == 1


def test_without_a_gpu_the_run_goes_on_and_says_why_nothing_is_recorded(caplog):
    with caplog.at_level(logging.WARNING, logger="nemo2"):
        run(NsysCallback(start_step=0, end_step=2))
    assert [r.getMessage() for r in caplog.records if "NsysCallback" in r.getMessage()] == [
        "NsysCallback records GPUs, but this machine has no GPU. It records nothing."
    ]


def test_nvtx_ranges_are_megatron_cores(monkeypatch):
    import megatron.core.utils as utils

    monkeypatch.setattr(utils, "_nvtx_enabled", False)
    run(NsysCallback(start_step=0, end_step=2, nvtx_ranges=True), steps=1)
    assert utils._nvtx_enabled
