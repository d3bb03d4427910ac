# SPDX-License-Identifier: Apache-2.0
"""TimingCallback in a real Lightning run whose clock is ours."""

import itertools
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from nemo2.callbacks import TimingCallback, timing
from nemo2.errors import ConfigError
from nemo2.models.flops import model_flops_per_step

SHAPE = SimpleNamespace(num_layers=2, hidden_size=16, num_attention_heads=2, ffn_hidden_size=32)


class Recorder(pl.loggers.logger.DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: Any, step: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.lines.append((step, dict(metrics)))


class OneWeight(pl.LightningModule):
    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        if config is not None:
            self.config = config

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Ones(pl.LightningDataModule):
    def __init__(self, sampler: Any) -> None:
        super().__init__()
        if sampler is not None:
            self.data_sampler = sampler

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.ones(100, 1))  # pyright: ignore[reportArgumentType]


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
    recorder = Recorder()
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=steps, log_every_n_steps=3, logger=recorder, callbacks=[callback],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(OneWeight(config), datamodule=Ones(sampler))
    return [(step, {k: v for k, v in metrics.items() if k != "epoch"}) for step, metrics in recorder.lines]


def test_it_logs_the_mean_step_time_on_logging_steps_only(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = logged(monkeypatch, TimingCallback())
    assert lines == [(2, {"train_step_timing in s": 2.0}), (5, {"train_step_timing in s": 5.0})]


def test_a_buffer_averages_over_the_last_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = logged(monkeypatch, TimingCallback(timer_kwargs={"buffer_size": 2}))
    assert [metrics["train_step_timing in s"] for _, metrics in lines] == [2.5, 5.5]


def test_tokens_and_flops_follow_from_batch_model_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = SimpleNamespace(current_global_batch_size=8, seq_len=64)
    callback = TimingCallback(log_tokens_per_sec=True)
    (_, metrics), _ = logged(monkeypatch, callback, sampler=sampler, config=SHAPE)
    assert metrics["tokens_per_second"] == pytest.approx(8 * 64 / 2.0)
    assert metrics["tokens_per_sec_per_gpu"] == pytest.approx(8 * 64 / 2.0)
    assert metrics["tflops_per_gpu"] == pytest.approx(model_flops_per_step(SHAPE, 64, 8) / 2.0 / 1e12)


def test_a_model_without_a_gpts_shape_gets_no_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = SimpleNamespace(current_global_batch_size=8, seq_len=64)
    (_, metrics), _ = logged(monkeypatch, TimingCallback(), sampler=sampler)
    assert sorted(metrics) == ["tokens_per_second", "train_step_timing in s"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"buffersize": 2}, "did you mean 'buffer_size'"),
        ({"buffer_size": 0}, "must be at least 1"),
        ({"reduction": "max"}, "must be 'mean'"),
    ],
)
def test_timer_settings_that_cannot_work_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TimingCallback(timer_kwargs=settings)
