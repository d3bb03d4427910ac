# SPDX-License-Identifier: Apache-2.0
"""Quantisation is ModelOpt's: what is told where it isn't installed, and which settings can't be. `tests/quantized` runs it."""

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from nemo2 import llm
from nemo2.base.errors import CheckpointError, ConfigError, OutputExists
from nemo2.checkpoint.directory import temporary_name


def test_without_modelopt_it_is_told_how_to_get_it_and_what_to_run_instead(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"nvidia-modelopt\[hf\].*nemo2 export runs/first --output FOLDER"):
        llm.ptq("runs/first", llm.ExportConfig(path="quantised"))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: llm.ptq("run", llm.ExportConfig(path="to"), calibration_tp=2),
            "calibration_tp=2: ModelOpt runs on .* in one process",
        ),
        (lambda: llm.ptq("run", llm.ExportConfig(path="to"), trust_remote_code=True), "trust_remote_code=True"),
        (lambda: llm.QuantizationConfig(algorithm="fp7"), "algorithm='fp7': must be one of fp8"),
        (lambda: llm.QuantizationConfig(calibration_seq_len=0), "calibration_seq_len=0: must be a whole number"),
        (lambda: llm.ExportConfig(path="to", export_format="trtllm"), "export_format='trtllm'"),
        (lambda: llm.ExportConfig(path="to", dtype="int3"), "dtype='int3'"),
    ],
)
def test_what_cannot_be_is_refused(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


def test_a_release_is_read_in_the_requested_dtype_and_written_whole_or_not_at_all(monkeypatch, tmp_path):
    def export(model: Any, export_dir: str) -> None:
        Path(export_dir).mkdir(exist_ok=True)
        (Path(export_dir) / "model.safetensors").write_text("")
        if failing:
            raise OSError("no space is left")

    assert transformers.AutoModelForCausalLM and transformers.AutoTokenizer  # imported before find_spec is replaced
    failing, read = [True], dict[str, Any]()
    modules = {name: types.ModuleType(name) for name in ("modelopt", "modelopt.torch", "modelopt.torch.quantization")}
    modules["modelopt.torch.export"] = types.ModuleType("modelopt.torch.export")
    modules["modelopt"].torch = modules["modelopt.torch"]  # pyright: ignore[reportAttributeAccessIssue]
    vars(modules["modelopt.torch"])["quantization"] = modules["modelopt.torch.quantization"]
    vars(modules["modelopt.torch.quantization"]).update(quantize=lambda *arguments: None, FP8_DEFAULT_CFG={})
    vars(modules["modelopt.torch.export"]).update(export_hf_checkpoint=export)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    release = types.SimpleNamespace(is_release=True, path=tmp_path, dtype=torch.float32)
    monkeypatch.setattr("nemo2.llm.quantization.Checkpoint.open", lambda path: release)
    monkeypatch.setattr(
        "transformers.AutoModelForCausalLM.from_pretrained", lambda folder, **options: read.update(options)
    )
    tokenizer = types.SimpleNamespace(save_pretrained=lambda folder: None)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda folder: tokenizer)
    to = llm.ExportConfig(path=str(tmp_path / "quantised"), dtype="bf16")
    temporary_name(tmp_path / "quantised").mkdir()  # a killed process left it
    with pytest.raises(CheckpointError, match="no space"):
        llm.ptq("hf://a/b", to, forward_loop=lambda model: None)
    assert list(tmp_path.iterdir()) == []
    failing.clear()
    assert llm.ptq("hf://a/b", to, forward_loop=lambda model: None) == tmp_path / "quantised"
    assert read == {"dtype": torch.bfloat16} and [path.name for path in tmp_path.iterdir()] == ["quantised"]
    with pytest.raises(OutputExists, match="delete what is there"):
        llm.ptq("hf://a/b", to, forward_loop=lambda model: None)
