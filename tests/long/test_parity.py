# SPDX-License-Identifier: Apache-2.0
"""The parity table's quick rows hold, and rows can fail."""

import itertools
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo2.checkpoint.shards import Shard
from support import gradients, moments
from support.nightly import each_case
from tests.long.parity import layouts, measure, reordered, run, verdict

ROWS = {row.name: row for row in layouts.ROWS}
QUICK = [name for name, row in ROWS.items() if row.quick]
# What the others add is compared every day in tests of its own, and `make parity-quick` runs them all.
DAILY = ["gpt, tied: PP 2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each model trains in one process once, for all the rows that compare with it."""
    return tmp_path_factory.mktemp("parity")


@pytest.mark.parametrize("name", each_case(QUICK, DAILY))
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
    def one_run(loss: float, norm: float, *gradient: float) -> dict[str, Any]:
        return {"losses": [4.0, loss], "grad_norms": [norm, 2.0], "gradients": whole(*gradient)}

    runs = [one_run(1.0, 1.0, 3.0, 4.0), one_run(1.01, 1.0, 3.0, 4.0), one_run(0.99, 1.2, 3.0, 4.5)]
    # Not the 1 % of either from the first, but the 2 % between the two.
    assert verdict.spread(runs) == {
        "loss": pytest.approx(0.02 / 0.99),
        "grad_norm": pytest.approx(0.2 / 1.2),
        "gradient": pytest.approx(0.5 / (3.0**2 + 4.5**2) ** 0.5),
    }


def products_in_another_order() -> dict[str, Any]:
    """Output and gradients of one linear layer in fp32 and bf16, as it is and in parts."""
    from megatron.core.tensor_parallel import layers

    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        for draw in (None, 0, 1, 2):
            torch.manual_seed(0)
            x, weight = (torch.randn(*shape).to(dtype).requires_grad_() for shape in ((3, 5, 16), (12, 16)))
            with reordered.products(parts=1 if draw is None else 2, draw=draw or 0):
                multiply = layers.linear_with_grad_accumulation_and_async_allreduce
                y = multiply(x, weight, None, False, False, False)
            y.backward(torch.randn(3, 5, 12).to(dtype))
            found[dtype, draw] = [tensor.detach().float() for tensor in (y, x.grad, weight.grad)]  # pyright: ignore[reportOptionalMemberAccess]
    return found


def test_sums_in_another_order_are_the_same_but_for_rounding(run_on_ranks: Any) -> None:
    found = run_on_ranks(products_in_another_order, 1)[0]
    for which in range(3):
        for draw in (0, 1, 2):
            exact = found[torch.float32, None][which]
            assert torch.allclose(found[torch.float32, draw][which], exact, rtol=1e-5, atol=1e-5)
            assert torch.allclose(found[torch.bfloat16, draw][which], exact, rtol=0.1, atol=0.1)
        drawn = [found[torch.bfloat16, draw][which] for draw in (None, 0, 1, 2)]
        assert all(not torch.equal(one, other) for one, other in itertools.combinations(drawn, 2))


class OfAdam:
    """A rank that holds rows 1 and 2 of the second of two layers stacked under one name."""

    @property
    def form(self) -> "OfAdam":
        return self

    def shards(self, *, model: bool, optimizer: bool) -> list[Shard]:
        assert optimizer and not model
        rows = torch.tensor([[[0.1, 0.2], [0.3, 0.4]]])
        second = torch.full((1, 2, 2), 9.0)
        return [
            Shard(key=f"{moments.KEY}module.layers.w", tensor=rows, offset=(1, 1, 0), global_shape=(2, 4, 2)),
            Shard(
                key="optimizer.state.exp_avg_sq.module.layers.w",
                tensor=second,
                offset=(1, 1, 0),
                global_shape=(2, 4, 2),
            ),
        ]


def test_adams_first_moment_tells_the_gradients_of_models_that_are_cut() -> None:
    reference = {("layers.w", (layer,)): {"label": f"{layer}.w", "gradient": torch.zeros(4, 2)} for layer in (0, 1)}
    (found,) = moments.pieces_of(OfAdam(), reference, factor=0.1 * moments.clipped(norm=2.0, limit=0.5))
    assert (found.name, found.place, found.shape) == (("layers.w", (1,)), (slice(1, 3), slice(0, 2)), (4, 2))
    assert torch.allclose(found.gradient, torch.tensor([[4.0, 8.0], [12.0, 16.0]]))
    assert (moments.clipped(norm=0.1, limit=0.5), moments.clipped(norm=9.0, limit=0.0)) == (1.0, 1.0)
    with pytest.raises(AssertionError, match="no parameter stored as layers.w"):
        list(moments.pieces_of(OfAdam(), {}, factor=1.0))


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


def test_rows_run_side_by_side_are_kept_and_come_back_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [ROWS[f"llama: {layout}"] for layout in ("DP 2", "TP 2", "PP 2")]

    def slow_at_first(row: layouts.Row, folder: Path, runner: Any) -> dict[str, Any]:
        time.sleep(1.5 if row.layout == "DP 2" else 0.0)
        verdict_of_row = "fails: loss" if row.layout == "PP 2" else "holds"
        report = {"name": row.name, "ranks": row.ranks, "verdict": verdict_of_row, "fingerprint": run.fingerprint(row)}
        return report | {"thread": threading.get_ident(), "finished": time.monotonic()}

    monkeypatch.setattr(run, "run_row", slow_at_first)
    reports = run.run_rows(rows, tmp_path)
    assert [report["name"] for report in reports] == [row.name for row in rows]
    assert threading.get_ident() not in {report["thread"] for report in reports}
    assert max(report["finished"] for report in reports[1:]) < reports[0]["finished"]
    assert "[  3/3] 2 ranks  llama: DP 2 " in capsys.readouterr().out
    again = run.run_rows(rows, tmp_path)
    assert again[:2] == reports[:2] and again[2]["finished"] > reports[2]["finished"], "only what failed runs anew"


def test_every_kind_of_parallelism_has_rows_alone_and_mixed() -> None:
    assert len(ROWS) == len(layouts.ROWS), "two rows have one name"
    assert len({run.slug(name) for name in ROWS}) == len(ROWS)
    assert {row.ranks for row in layouts.ROWS} == {2, 4, 8}
    for name in ("FSDP2", "FSDP", "Megatron-FSDP"):
        held = {row.run.model for row in layouts.ROWS if row.layout.split(",")[0] == name and not row.refused}
        assert {"llama", "gpt, tied", "mixtral", "deepseek"} <= held
    for model in ("llama", "gpt, tied", "mixtral", "deepseek"):
        assert len([row for row in layouts.ROWS if row.run.model == model and row.run.precision == "32"]) >= 5
