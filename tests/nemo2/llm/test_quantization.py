# SPDX-License-Identifier: Apache-2.0
"""Quantisation is ModelOpt's: what is told where it isn't installed, and which settings can't be. `tests/quantized` runs it."""

import importlib.util
from typing import Any

import pytest

from nemo2 import llm
from nemo2.errors import ConfigError


def test_without_modelopt_it_is_told_how_to_get_it_and_what_to_run_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"nvidia-modelopt\[hf\].*nemo2 export runs/first --output FOLDER"):
        llm.ptq("runs/first", llm.ExportConfig(path="quantised"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"calibration_tp": 2}, "calibration_tp=2: ModelOpt runs on transformers' model in one process"),
        ({"trust_remote_code": True}, "trust_remote_code=True"),
    ],
)
def test_nemos_arguments_that_mean_nothing_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        llm.ptq("runs/first", llm.ExportConfig(path="quantised"), **arguments)


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="algorithm='fp7': must be one of fp8"):
        llm.QuantizationConfig(algorithm="fp7")
    with pytest.raises(ConfigError, match="calibration_seq_len=0: must be at least 1"):
        llm.QuantizationConfig(calibration_seq_len=0)
    with pytest.raises(ConfigError, match="export_format='trtllm'"):
        llm.ExportConfig(path="quantised", export_format="trtllm")
    with pytest.raises(ConfigError, match="dtype='int3'"):
        llm.ExportConfig(path="quantised", dtype="int3")
