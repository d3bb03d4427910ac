# SPDX-License-Identifier: Apache-2.0
"""The GPU benchmark at toy size on a CPU, and what it makes of turns whose times are known."""

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import pytest

from bench.gpu.__main__ import clocks, comparable
from bench.gpu.cases import GPUS, Case, cases, gpu_for, recipe_of
from bench.gpu.report import data_sheet_flops, figures, gains, page, step_flops
from nemo2.mcore.settle import Machine
from nemo2.preflight.checks import check_recipe

ROOT = Path(__file__).resolve().parents[2]

CASE = Case(recipe="llama32_1b", layers=2, seq=64, microbatches=2, toy=True)


def turn(arm: str, repeat: int, *seconds: float) -> dict:
    return {"arm": arm, "repeat": repeat, "seconds": list(seconds), "losses": [6.0, 5.0], "peak_bytes": 2**30}


def test_ratios_are_taken_within_a_repeat_and_their_median_counts() -> None:
    turns = [turn("ours", 0, 2.0, 2.0), turn("bare", 0, 1.0, 1.0)]
    turns += [turn("ours", 1, 1.0, 1.0), turn("bare", 1, 1.5, 0.5)]
    turns += [turn("ours", 2, 4.0, 4.0), turn("bare", 2, 6.0, 2.0)]
    row = figures(CASE, turns, {"bf16": 1e9})
    assert row["ratios"]["ours / bare"] == 1.0
    assert row["ratios"]["ours / HF"] is None
    ours = row["arms"]["ours"]
    assert (ours["step_seconds"], ours["spread"], ours["tokens_per_second"]) == (2.0, [1.0, 4.0], 64.0)
    assert row["ratios"]["of the product's peak"] == pytest.approx(step_flops(CASE, causal=True) / 2.0 / 1e9)


def test_the_prediction_stands_beside_the_measurement_on_a_gpu_that_is_known() -> None:
    case = Case(recipe="llama3_8b", layers=20, seq=8192)
    row = figures(case, [turn("ours", 0, 1.0)], {}, device="NVIDIA H200")
    guess = row["arms"]["ours"]["predicted_tokens_per_second"]
    peak = 989e12 * case.tokens_per_step / step_flops(case, causal=True)
    assert 0.3 * peak < guess < 0.8 * peak
    assert row["arms"]["ours"]["mfu"]["causal"] == pytest.approx(case.tokens_per_step / peak)  # in one second
    assert data_sheet_flops(dataclasses.replace(case, precision="fp8-current"), "NVIDIA H200") == 1979e12
    assert data_sheet_flops(case, "x86_64") is None
    assert (
        figures(case, [turn("ours", 0, 1.0)], {}, device="x86_64")["arms"]["ours"]["predicted_tokens_per_second"]
        is None
    )


def test_an_arm_that_fails_is_a_row_with_its_reason() -> None:
    turns = [turn("ours", 0, 1.0), {"arm": "hf", "repeat": 0, "failed": "OutOfMemoryError: CUDA out of memory"}]
    row = figures(CASE, turns, {})
    assert row["arms"]["hf"] == {"failed": "OutOfMemoryError: CUDA out of memory"}
    result = {
        "device": "a GPU", "date": "today", "toy": False, "versions": {"torch": "2"}, "peaks": {"bf16": 8e14},
        "rows": [row], "left_out": ["the rest, for the time was up"],
    }  # fmt: skip
    written = page(result)
    assert "| HF Trainer | OutOfMemoryError: CUDA out of memory | | | | | |" in written
    assert "| llama32_1b/64/bf16 | – | – | – | – | – |" in written
    assert written.endswith("Not measured: the rest, for the time was up.\n")


def test_gains_are_over_our_own_case_without() -> None:
    speeds = {"bf16": 100.0, "fp8-delayed": 140.0, "bf16+graphs-full_iteration": 110.0}
    rows = [
        {"case": f"llama3_8b/8192/{precision}", "arms": {"ours": {"tokens_per_second": speed}}}
        for precision, speed in speeds.items()
    ]
    assert gains([*rows, {"case": "x/1/fp8-delayed", "arms": {"ours": {"failed": "no"}}}]) == {
        "fp8 / bf16": {"llama3_8b/8192/fp8-delayed": pytest.approx(1.4)},
        "graphs / none": {"llama3_8b/8192/bf16+graphs-full_iteration": pytest.approx(1.1)},
    }


def test_every_gpu_has_its_numbers_of_layers_and_graphs_their_cases() -> None:
    for gpu in GPUS:
        names = [case.name for case in cases(gpu)]
        assert len(set(names)) == len(names)
    assert gpu_for(139.8) == "H200"
    assert gpu_for(79.1) == "H100"
    with pytest.raises(ValueError, match="24 GiB"):
        gpu_for(24)
    captured = [case for case in cases("H100") if case.graphs]
    assert {case.graphs for case in captured} == {"transformer_engine", "full_iteration"}
    assert recipe_of(captured[0]).model.config.cuda_graph_impl == captured[0].graphs
    for case in captured:
        check_recipe(recipe_of(case), machine=Machine.named("H100"))  # raises where the run would refuse it
    assert [arm for arm in ("ours", "bare", "hf") if comparable(arm, captured[0])] == ["ours"]
    assert not comparable("hf", Case(recipe="llama32_1b", layers=None, seq=64, precision="fp8-delayed"))


def test_clocks_are_told_where_a_driver_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert clocks() == {}
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho '1980 MHz, 345 MHz, 2619 MHz, 700.00 W, Enabled, 580.1'\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    told = clocks()
    assert (told["clocks.max.sm"], told["power.limit"]) == ("1980 MHz", "700.00 W")
    result = {
        "device": "a GPU", "date": "today", "toy": False, "clocks": told, "versions": {}, "peaks": {}, "rows": [], "left_out": [],
    }  # fmt: skip
    assert "power.limit 700.00 W" in page(result)


def test_toys_are_told_apart_by_recipe_and_have_fp8_where_it_is_asked_for() -> None:
    toys = cases(toy=True)
    assert [case.recipe for case in toys] == ["llama3_8b", "llama32_1b", "mixtral_8x7b", "qwen3_30b_a3b"]
    assert all(case.toy and case.precision == "bf16" for case in toys)
    eighths = [case for case in cases(toy=True, fp8=True) if case.precision != "bf16"]
    assert {case.name.split("/")[0] for case in eighths} == {case.recipe for case in toys}
    assert all(case.toy and case.layers == 4 for case in eighths)


def run(commands: dict[str, str], *arguments: str, module: str = "bench.gpu") -> subprocess.CompletedProcess:
    environment = os.environ | commands | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        ["python", "-m", module, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280
    )


@pytest.mark.nightly
def test_ours_and_the_bare_loop_run_a_toy_of_experts(tmp_path: Path, warm_commands: dict[str, str]) -> None:
    options = ["--repeats", "1", "--steps", "3", "--warm-up", "1", "--arms", "ours", "bare"]
    done = run(warm_commands, "--toy", "--only", "mixtral", *options, "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    (row,) = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert row["ratios"]["ours / bare"] > 0
    ours, bare = row["arms"]["ours"], row["arms"]["bare"]
    # Other random weights, the same model: both start at the uniform distribution over 512 ids.
    assert ours["first_and_last_loss"][0] == pytest.approx(bare["first_and_last_loss"][0], rel=0.02)
    assert (tmp_path / "gpu.md").read_text() in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "llama9"], "no such case"),
        (["--warm-up", "24"], "leaves no two"),
        (["--only", "llama32_1b"], "This machine has no GPU"),
    ],
)
def test_what_cannot_be_measured_is_said_with_exit_code_2(
    arguments: list[str], words: str, warm_commands: dict[str, str]
) -> None:
    done = run(warm_commands, *arguments)
    assert done.returncode == 2
    assert words in done.stderr


def test_a_recipe_for_one_gpu_runs_beside_what_is_counted_for_it(warm_commands: dict[str, str]) -> None:
    done = run(warm_commands, "--toy", "qwen3_600m_24gb:lora", module="bench.gpu.memory")
    assert done.returncode == 0, done.stderr[-3000:]
    name, counted, measured, reserved, seconds, speed = done.stdout.splitlines()[-1].strip("| ").split(" | ")
    assert name == "qwen3_600m_24gb:lora" and float(measured) >= float(counted) >= 0 and float(seconds) > 0
    assert int(speed.replace(",", "")) > 0 and reserved == "0.0"  # a CPU reserves nothing
