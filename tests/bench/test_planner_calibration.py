# SPDX-License-Identifier: Apache-2.0
"""The calibration itself: rows are read as they say, a fit finds constants that made the rows, ranking counts pairs."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from bench.planner import memory_score, report
from bench.planner.fit import errors_of, fit, left_out, row_weights, summary, values_at
from bench.planner.memory_rows import memory_rows
from bench.planner.ranking import ranking
from bench.planner.rows import Row, rows
from nemo2.preflight.planner.constants import PRIORS, Constants, calibrated
from nemo2.preflight.planner.error_band import job_kind
from nemo2.preflight.planner.step_time import predict

DOCS = Path(report.__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def measured() -> list[Row]:
    return list(rows())


def test_rows_are_read_as_their_tables_say(measured: list[Row]) -> None:
    assert len(measured) > 900 and len({row.family for row in measured}) > 10
    row = next(row for row in measured if row.source.startswith("arXiv 2205.05198") and row.name == "mtnlg-530b")
    assert (len(row.shape.layers), row.shape.hidden, row.job.tp, row.job.pp, row.job.vp) == (105, 20480, 8, 35, 3)
    assert not row.job.overlap_tp and row.job.attention == "softmax"
    sharded = [row for row in measured if row.family == "mosaicml"]
    assert {row.job.sharding for row in sharded} == {"fsdp"}


def test_rows_say_what_their_container_did(measured: list[Row]) -> None:
    def made_in(container: str, model: str) -> list[Row]:
        return [row for row in measured if f"container={container};" in row.notes and row.name == model]

    late, early = made_in("26.06", "qwen3-30b-a3b"), made_in("26.04", "qwen3-30b-a3b")
    whole = {row.job.gpu.name: (row.job.graphed_experts, row.job.fused_experts, row.job.overlap_ep) for row in late}
    # The graph of a whole step is for MXFP8, which Hopper lacks.
    assert whole["GB200"] == (True, True, True) and whole["H100"] == (False, False, False)
    assert not any(row.job.graphed_experts for row in early)
    assert {row.job.dispatch for row in [*late, *early]} == {"once"}
    assert not any(row.job.graphed_experts for row in made_in("26.06", "nemotron3-nano-30b-a3b"))
    dropped = [row for row in measured if "tokendrop" in row.notes]
    assert dropped and all(row.job.capacity and row.job.dispatch == "alltoall" for row in dropped)


def test_further_predictions_are_where_the_printed_flops_have_them(measured: list[Row]) -> None:
    found = {
        ("w/o MTP" in row.notes, len(row.shape.further))
        for row in measured
        if row.name == "deepseek-v3" and "container" in row.notes
    }
    assert found == {(True, 0), (False, 1)}


def test_a_band_counts_rows_of_a_large_project_less(measured: list[Row]) -> None:
    alike = [row for row in measured if job_kind(row.shape, row.job) == "dense, 16 bits"]
    few = [row for row in alike if row.family == "InternLM"][:12]
    many = [row for row in alike if row.family == "Aleph"]
    off = np.array([0.3] * len(few) + [0.0] * len(many))
    ((low, high, count),) = report.bands([*few, *many], off).values()
    # Less than a tenth of the rows, and more than a sixth of what they say.
    assert 0 < len(few) < len(many) / 10 and count == len(few) + len(many)
    assert low < 0.8 and high == 1.0


def test_published_speeds_are_predicted_as_well_as_the_page_says(measured: list[Row]) -> None:
    _, size, near = summary(
        math.log(predict(row.shape, row.job).tokens_per_second_per_gpu / row.measured) for row in measured
    )
    assert size < 0.07 and near > 0.8


def test_memory_verdicts_are_right_as_often_as_the_page_says() -> None:
    found = memory_score.score(list(memory_rows()))
    assert found.right >= 0.94 and found.median_peak <= 0.07
    assert found.oom_seen > 0.85 and found.fits_seen > 0.95


def test_a_fit_finds_the_constants_that_made_the_measurements(measured: list[Row]) -> None:
    chosen = [row for row in measured if row.family == "dgxc"][::9]
    truth = {name: prior.value for name, prior in PRIORS.items()} | {"gemm.hopper": 0.62, "norm_bytes": 110.0}
    made = Constants.of(truth)
    synthetic = [
        dataclasses.replace(row, measured=predict(row.shape, row.job, made).tokens_per_second_per_gpu) for row in chosen
    ]
    fitted = fit(synthetic, rounds=3, weights=np.ones(len(synthetic)))
    values = values_at(fitted.at)
    assert abs(values["gemm.hopper"] - 0.62) < 0.04
    # A constant that these rows don't tell stays where the guess is.
    assert math.isclose(values["flash.volta"], PRIORS["flash.volta"].value)


def test_rows_of_a_large_project_count_less_each(measured: list[Row]) -> None:
    few = [row for row in measured if row.family == "foundation"][:2]
    many = [row for row in measured if row.family == "Aleph"]
    weights = row_weights([*few, *many])
    assert weights[0] > 10 * weights[-1] and weights[2:].sum() > weights[:2].sum()


def test_a_source_that_is_left_out_has_no_part_in_its_prediction(measured: list[Row]) -> None:
    ours = [row for row in measured if row.family == "Megatron-LM"]
    others = [row for row in measured if row.family == "docs.nvidia.com/nemo-fra"]
    wrong = [dataclasses.replace(row, measured=row.measured * 1.5) for row in ours]

    def predicted(mine: list[Row]) -> np.ndarray:
        everything = [*mine, *others]
        return left_out(everything, fit(everything, rounds=1), lambda row: row.family)[: len(mine)]

    # The same prediction, against a measurement that is half as much again.
    assert np.allclose(predicted(wrong) - predicted(ours), -math.log(1.5), atol=0.02)


def test_ranking_counts_pairs_of_layouts_that_differ(measured: list[Row]) -> None:
    base = next(row for row in measured if row.family == "dgxc")
    speeds = (100.0, 101.0, 200.0)
    three = [dataclasses.replace(base, measured=speed) for speed in speeds]
    assert ranking(three, [0.0, 0.0, 0.0]).pairs == 2
    assert ranking(three, [0.0, 0.0, -1.0]).right == 0.0
    assert ranking(three, [0.0, 0.0, -0.5]).right == 1.0
    assert ranking(three, [0.0, 0.0, 0.0], apart=0.0).pairs == 3


def test_a_page_keeps_what_is_around_its_tables(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- speed -->\nold\n<!-- /speed -->\nafter\n")
    report.replace_between(page, "speed", "new")
    assert page.read_text() == "before\n<!-- speed -->\nnew\n<!-- /speed -->\nafter\n"
    with pytest.raises(ValueError, match="no place for memory"):
        report.replace_between(page, "memory", "new")


def test_the_packages_constants_are_those_of_the_page() -> None:
    page, values = (DOCS / "plan-calibration.md").read_text(), dataclasses.asdict(calibrated())
    rows = {cells[1].strip("` "): cells for cells in (line.split("|") for line in page.splitlines() if "| `" in line)}
    assert rows.keys() == PRIORS.keys()
    for name, (_, _, guess, value, why, _) in rows.items():
        group, _, generation = name.partition(".")
        expected = values[group][generation] if generation else values[group]
        # The page rounds the fit, the package's file rounds it to one more digit.
        assert float(guess) == PRIORS[name].value and math.isclose(float(value), expected, rel_tol=5e-3), name
        assert why.strip() == report.reasons()[group]


def test_users_read_the_errors_of_the_calibration_page() -> None:
    calibration, users = ((DOCS / name).read_text() for name in ("plan-calibration.md", "plan.md"))

    def row(part: str, start: str) -> list[str]:
        text = calibration.partition(f"<!-- {part} -->")[2].partition(f"<!-- /{part} -->")[0]
        (line,) = (line for line in text.splitlines() if line.startswith(f"| {start} |"))
        return line.strip("| ").split(" | ")

    for group in ("**NVIDIA, dense models**", "**models with experts**", "**all**"):
        _, count, *_, size, near = row("speed", group)
        assert f"| {int(count):,} published speeds | median error {size}, {near} within 15% |" in users
    _, pairs, _, _, right, _ = row("ranking", "speeds at least 5% apart")
    assert f"| {pairs} published pairs, at least 5% apart | {right} correct |" in users
    _, runs, right, *_ = row("memory", "all")
    assert f"| {runs} published runs | {right} correct |" in users


def test_a_perfect_prediction_is_always_right_in_the_users_table(measured: list[Row]) -> None:
    score = memory_score.Score(verdicts=8, right=0.5, oom_seen=1.0, fits_seen=0.0, peaks=0, median_peak=0.0)
    table = report.trust_table(measured, [0.0] * len(measured), score).splitlines()
    assert all(line.endswith("median error 0.0%, 100% within 15% |") for line in table[2:5])
    assert table[5].endswith("100.0% correct |") and table[6].endswith("8 published runs | 50% correct |")


def test_published_speeds_of_lora_are_predicted_with_what_they_were_put_beside(measured: list[Row]) -> None:
    tuned = [row for row in measured if row.job.lora]
    assert len(tuned) >= 22
    median, size, near = summary(errors_of(tuned, calibrated()))
    assert abs(median) < 0.05 and size < 0.06
    assert near > 0.8
    # What software didn't overlap or fuse in 2024 and 2023 isn't known of a row.
    known = [row for row in tuned if "24.03" not in row.source and "no TE" not in row.notes]
    assert summary(errors_of(known, calibrated()))[2] == 1.0
    without = [dataclasses.replace(row, job=dataclasses.replace(row.job, adapters=None)) for row in tuned]
    assert summary(errors_of(without, calibrated()))[1] > size
