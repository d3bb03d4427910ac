# SPDX-License-Identifier: Apache-2.0
"""The settings reach NVIDIA's detector, a stand-in with the arguments of nvidia-resiliency-ext 0.4.1's callback."""

import logging
import sys
from types import ModuleType
from typing import Any

import fiddle as fdl
import pytest
import torch

from nemo2.base.errors import ConfigError
from nemo2.callbacks import StragglerDetectionCallback
from nemo2.recipes.callbacks.common import straggler_det_callback
from support.one_weight import run


class Detector:
    made: list["Detector"] = []

    def __init__(
        self,
        report_time_interval: float,
        calc_relative_gpu_perf: bool,
        calc_individual_gpu_perf: bool,
        num_gpu_perf_scores_to_print: int,
        gpu_relative_perf_threshold: float,
        gpu_individual_perf_threshold: float,
        stop_if_detected: bool,
        enable_ptl_logging: bool,
        profiling_interval: int = 1,
        logger_name: str = "",
    ) -> None:
        self.settings = (report_time_interval, gpu_relative_perf_threshold, stop_if_detected)
        self.hooks: list[str] = []
        Detector.made.append(self)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.hooks.append("setup")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.hooks.append("step")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.hooks.append("teardown")


def test_the_detector_gets_settings_and_hooks(monkeypatch):
    package, part = ModuleType("nvidia_resiliency_ext"), ModuleType("nvidia_resiliency_ext.ptl_resiliency")
    part.StragglerDetectionCallback = Detector  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, part.__name__, part)
    monkeypatch.setattr("nemo2.callbacks.straggler_detection.has", lambda name: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    Detector.made.clear()
    run(fdl.build(straggler_det_callback(60, False, 0.5)), steps=2)
    (detector,) = Detector.made
    assert detector.settings == (60, 0.5, False)
    assert detector.hooks == ["setup", "step", "step", "teardown"]


def test_a_gpu_without_the_package_is_an_error_that_names_it(monkeypatch):
    for module in ("nemo2.callbacks.straggler_detection", "nemo2.base.backend.extras"):
        monkeypatch.setattr(f"{module}.has", lambda name: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="pip install nvidia-resiliency-ext"):
        run(StragglerDetectionCallback(), steps=1)


def test_without_a_gpu_it_says_so_and_the_run_goes_on(caplog):
    with caplog.at_level(logging.WARNING, logger="nemo2"):
        run(StragglerDetectionCallback(), steps=1)
    assert "this machine has no GPU. It compares nothing" in caplog.text
