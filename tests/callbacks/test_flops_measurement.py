# SPDX-License-Identifier: Apache-2.0
"""FLOPs per second over all time between logged lines, in a run whose clock is ours."""

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest

from nemo2.base.errors import ConfigError
from nemo2.callbacks import FLOPsMeasurementCallback, flops_measurement
from nemo2.models.flops import model_flops_per_step
from support.one_weight import SAMPLER, SHAPE, run


def logged(
    monkeypatch: pytest.MonkeyPatch, callback: FLOPsMeasurementCallback, **options: Any
) -> list[dict[str, float]]:
    """The lines of a run in which each reading of the clock is two seconds after the last."""
    clock = iter(range(0, 1000, 2))
    monkeypatch.setattr(flops_measurement, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    return [metrics for _, metrics in run(callback, **({"sampler": SAMPLER, "config": SHAPE} | options))]


def test_the_time_between_steps_counts_and_three_steps_share_it(monkeypatch):
    first, second = logged(monkeypatch, FLOPsMeasurementCallback())
    expected = 3 * model_flops_per_step(SHAPE, 64, 8, causal=False) / 2.0 / 1e12
    for line in (first, second):
        assert line == {"TFLOPS_per_GPU": pytest.approx(expected), "TFLOPS": pytest.approx(expected)}


def test_mfu_is_a_share_of_the_peak_and_attention_can_count_causally(monkeypatch):
    line, _ = logged(monkeypatch, FLOPsMeasurementCallback(causal=True, peak_tflops=1e-6))
    assert line["TFLOPS_per_GPU"] == pytest.approx(3 * model_flops_per_step(SHAPE, 64, 8) / 2.0 / 1e12)
    assert line["MFU"] == pytest.approx(line["TFLOPS_per_GPU"] / 1e-6)


def test_the_share_of_a_gpu_counts_the_gpus_of_all_nodes(monkeypatch):
    monkeypatch.setattr(pl.Trainer, "world_size", 16)  # two nodes of eight; num_devices is those of a node
    line, _ = logged(monkeypatch, FLOPsMeasurementCallback())
    assert line["TFLOPS_per_GPU"] == pytest.approx(line["TFLOPS"] / 16)


def test_shape_and_batch_can_be_given_as_in_nemo(monkeypatch):
    data = SimpleNamespace(global_batch_size=2, seq_length=128)
    callback = FLOPsMeasurementCallback(SHAPE, data, "llama3")
    line, _ = logged(monkeypatch, callback, sampler=None, config=None)
    assert line["TFLOPS"] == pytest.approx(3 * model_flops_per_step(SHAPE, 128, 2, causal=False) / 2.0 / 1e12)


@pytest.mark.parametrize(
    ("callback", "options", "words"),
    [
        (FLOPsMeasurementCallback(), {"config": None}, "OneWeight has none"),
        (FLOPsMeasurementCallback(), {"sampler": None}, "no data_sampler"),
    ],
)
def test_a_shape_that_cannot_be_read_stops_the_run_before_its_first_step(monkeypatch, callback, options, words):
    with pytest.raises(ConfigError, match=words):
        logged(monkeypatch, callback, **options)
