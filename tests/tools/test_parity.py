# SPDX-License-Identifier: Apache-2.0
"""The parity table's quick rows hold, and rows can fail."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tools.parity import gradients, layouts, measure, run, verdict

ROWS = {row.name: row for row in layouts.ROWS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each model trains in one process once, for all the rows that compare with it."""
    return tmp_path_factory.mktemp("parity")


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.quick])
def test_a_layout_trains_as_one_process_does(run_on_ranks: Any, folder: Path, name: str) -> None:
    report = run.run_row(ROWS[name], folder, run_on_ranks)
    assert report["verdict"] == "holds", report


def layout_with_a_wrong_gradient(this_run: measure.Run, reference: str) -> dict[str, Any]:
    """One rank's copy of one norm is off by a thousandth at every step, as if it had not been summed like the others."""
    right = gradients._complete

    def wrong(chunk: Any) -> None:
        right(chunk)
        if torch.distributed.get_rank() == 1:
            chunk.module.decoder.layers[2].input_layernorm.weight.main_grad.mul_(1.001)

    gradients._complete = wrong
    return measure.layout(this_run, reference)


def test_a_row_whose_gradient_is_wrong_on_one_rank_fails_and_names_the_parameter(
    run_on_ranks: Any, folder: Path
) -> None:
    def runner(function: Any, world: int, *arguments: Any) -> list[Any]:
        changed = layout_with_a_wrong_gradient if function is measure.layout else function
        return run_on_ranks(changed, world, *arguments)

    report = run.run_row(ROWS["llama: TP 2 + SP"], folder, runner)
    assert report["verdict"].startswith("fails: ") and "gradient" in report["verdict"]
    assert report["parameter"] == "decoder.layers.2.input_layernorm.weight"
    assert report["gradient"] == pytest.approx(1e-3, rel=0.01)


def test_a_refusal_is_a_row_too_and_must_come(run_on_ranks: Any, folder: Path) -> None:
    refused = next(row for row in layouts.ROWS if row.refused)
    assert (
        run.run_row(refused, folder, answering(run.ranks.RankFailed(f"ConfigError: {refused.refused}")))["verdict"]
        == "refused"
    )
    other = run.run_row(refused, folder, answering(run.ranks.RankFailed("ConfigError: something else")))
    assert (other["verdict"], other["error"]) == ("fails: error", "ConfigError: something else")


def answering(error: Exception) -> Any:
    def runner(*_: Any) -> list[Any]:
        raise error

    return runner


def test_a_row_fails_where_a_figure_exceeds_its_bound_or_is_not_a_number() -> None:
    expected = {"losses": [2.0, 4.0], "grad_norms": [1.0, 1.0]}
    found = verdict.differences(
        {"losses": [2.0, 4.0002], "grad_norms": [1.0, float("nan")], "errors": {"a": 1e-9, "b": 2e-4}}, expected
    )
    assert found["loss"] == pytest.approx(5e-5) and found["parameter"] == "b"
    assert verdict.broken(found, verdict.BOUNDS) == ["loss", "grad_norm", "gradient"]
    assert verdict.broken(found, {"loss": 1e-4, "gradient": 1e-3}) == []


def test_in_bf16_a_row_may_differ_as_much_as_one_process_does_from_itself() -> None:
    found = [
        {"loss": 1e-4, "grad_norm": 3e-3, "gradient": 2e-2, "parameter": "a"},
        {"loss": 2e-4, "grad_norm": 1e-3, "gradient": 1e-2, "parameter": "b"},
    ]
    assert verdict.spread(found) == {"loss": 2e-4, "grad_norm": 3e-3, "gradient": 2e-2}


def whole(*values: float) -> dict[gradients.Name, dict[str, Any]]:
    return {("w", ()): {"label": "w", "gradient": torch.tensor(values)}}


def piece(start: int, *values: float) -> gradients.Piece:
    return gradients.Piece(("w", ()), "w", (slice(start, start + len(values)),), (4,), torch.tensor(values))


def test_pieces_of_a_gradient_are_compared_where_they_belong_and_the_worst_copy_counts() -> None:
    reference = whole(3.0, 4.0, 0.0, 0.0)
    right = gradients.differences([piece(0, 3.0, 4.0), piece(2, 0.0, 0.0)], reference)
    assert gradients.relative_errors(right, reference) == {"w": 0.0}
    wrong_copy = gradients.differences([piece(0, 3.0, 4.5)], reference)
    assert gradients.relative_errors(right + wrong_copy, reference) == {"w": pytest.approx(0.1)}
    assert gradients.relative_errors(
        right + gradients.differences([piece(2, float("nan"), 0.0)], reference), reference
    ) == {"w": float("inf")}


def test_ranks_that_do_not_hold_the_whole_of_a_parameter_are_an_error() -> None:
    reference = whole(3.0, 4.0, 0.0, 0.0)
    with pytest.raises(AssertionError, match="w: ranks hold 2 of 4 elements"):
        gradients.relative_errors(gradients.differences([piece(0, 3.0, 4.0)], reference), reference)


def test_a_gradient_that_should_be_zero_must_be() -> None:
    reference = whole(0.0, 0.0, 0.0, 0.0)
    right = gradients.differences([piece(0, 0.0, 0.0, 0.0, 0.0)], reference)
    wrong = gradients.differences([piece(0, 0.0, 0.0, 1e-12, 0.0)], reference)
    assert gradients.relative_errors(right, reference) == {"w": 0.0}
    assert gradients.relative_errors(wrong, reference) == {"w": float("inf")}


def test_kept_rows_are_taken_for_what_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = ROWS["llama: TP 2 + SP"]
    report = {"name": row.name, "ranks": 2, "verdict": "holds", "fingerprint": run.fingerprint(row)}
    (tmp_path / f"{run.slug(row.name)}.json").write_text(run.json.dumps(report))
    assert run.run_rows([row], tmp_path) == [report]
    assert "[  1/1] 2 ranks  llama: TP 2 + SP" in capsys.readouterr().out
    assert run.fingerprint(row) != run.fingerprint(ROWS["llama: TP 2"])


def test_every_kind_of_parallelism_has_rows_alone_and_mixed() -> None:
    assert len(ROWS) == len(layouts.ROWS), "two rows have one name"
    assert len({run.slug(name) for name in ROWS}) == len(ROWS)
    assert {row.ranks for row in layouts.ROWS} == {2, 4, 8}
    for model in ("llama", "gpt, tied", "mixtral", "deepseek"):
        assert len([row for row in layouts.ROWS if row.run.model == model and row.run.precision == "32"]) >= 5
