# SPDX-License-Identifier: Apache-2.0
"""TimingCallback in a real Lightning run whose clock is ours."""

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from nemo2.callbacks import TimingCallback, timing
from nemo2.models.flops import model_flops_per_step
from support.one_weight import SHAPE, run


def logged(
    monkeypatch: pytest.MonkeyPatch,
    callback: TimingCallback,
    *,
    sampler: Any = None,
    config: Any = None,
    steps: int = 6,
) -> list[tuple[int, dict[str, float]]]:
    """Metrics of a run whose n-th step takes n seconds."""
    ends = itertools.accumulate(itertools.chain.from_iterable((100.0, float(n)) for n in itertools.count(1)))
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: next(ends)))
    return run(callback, sampler=sampler, config=config, steps=steps)


def test_it_logs_the_mean_step_time_on_logging_steps_only(monkeypatch):
    lines = logged(monkeypatch, TimingCallback())
    assert lines == [(2, {"train_step_timing in s": 2.0}), (5, {"train_step_timing in s": 5.0})]


def test_a_buffer_averages_over_the_last_steps(monkeypatch):
    lines = logged(monkeypatch, TimingCallback(timer_kwargs={"buffer_size": 2}))
    assert [metrics["train_step_timing in s"] for _, metrics in lines] == [2.5, 5.5]


def test_tokens_and_flops_follow_from_batch_model_and_time(monkeypatch):
    sampler = SimpleNamespace(current_global_batch_size=8, seq_len=64)
    callback = TimingCallback(log_tokens_per_sec=True)
    (_, metrics), _ = logged(monkeypatch, callback, sampler=sampler, config=SHAPE)
    assert metrics["tokens_per_second"] == pytest.approx(8 * 64 / 2.0)
    assert metrics["tokens_per_sec_per_gpu"] == pytest.approx(8 * 64 / 2.0)
    assert "tflops_per_gpu" not in metrics, "nobody knows what a CPU could do"
    gpu = SimpleNamespace(root_device=torch.device("cuda"), data_sampler=sampler)
    trainer: Any = SimpleNamespace(strategy=gpu, world_size=2)
    rates = callback._rates(trainer, cast(Any, SimpleNamespace(config=SHAPE)), [(8, 64)], 2.0)
    assert rates["tflops_per_gpu"] == pytest.approx(model_flops_per_step(SHAPE, 64, 8) / 2.0 / 2 / 1e12)


class Growing:
    """A sampler whose batches have 1, 2, 3 ... samples, and that is at the next batch once it was asked."""

    seq_len = 64
    batches = 0

    @property
    def current_global_batch_size(self) -> int:
        self.batches += 1
        return self.batches


def test_the_tokens_of_a_ramp_up_are_those_of_the_steps_that_took_the_time(monkeypatch):
    lines = logged(monkeypatch, TimingCallback(), sampler=Growing())
    assert [metrics["tokens_per_second"] for _, metrics in lines] == [pytest.approx(64)] * 2, "n samples in n seconds"


def test_a_model_without_a_gpts_shape_gets_no_flops(monkeypatch):
    sampler = SimpleNamespace(current_global_batch_size=8, seq_len=64)
    (_, metrics), _ = logged(monkeypatch, TimingCallback(), sampler=sampler)
    assert sorted(metrics) == ["tokens_per_second", "train_step_timing in s"]
