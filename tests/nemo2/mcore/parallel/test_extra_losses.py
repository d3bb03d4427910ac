# SPDX-License-Identifier: Apache-2.0
"""A coefficient of an extra loss acts the same for every mask, padding, packing and layout."""

from pathlib import Path
from typing import Any

import pytest

from support import extra_losses
from support.nightly import each_case

CASES = {case.name: case for case in extra_losses.CASES}
ROUTERS = ["load balancing", "by sequence", "over replicas", "z-loss"]
FURTHER = ["further token"]


class Measured:
    """Figures of cases, and the references that they need, each measured once."""

    def __init__(self, run_on_ranks: Any, folder: Path) -> None:
        self.run_on_ranks, self.folder = run_on_ranks, folder

    def of(self, name: str, losses: list[str]) -> dict[str, tuple[float, float]]:
        case = CASES[name]
        for reference in extra_losses.REFERENCES:
            paths = {loss: extra_losses.path_of_reference(self.folder, case, loss) for loss in losses}
            same = [
                loss for loss in losses if extra_losses.path_of_reference(self.folder, reference, loss) == paths[loss]
            ]
            if missing := [loss for loss in same if not paths[loss].exists()]:
                self.run_on_ranks(extra_losses.measure, 1, reference, missing, str(self.folder))
        return self.run_on_ranks(extra_losses.measure, case.ranks, case, losses, str(self.folder))[0]


@pytest.fixture(scope="module")
def measured(run_on_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return Measured(run_on_ranks, tmp_path_factory.mktemp("extra losses"))


PADDED = (
    "TP 2, answers, padded to 96",
    "CP 2, answers, padded to 96",
    "padded to 96, mean of micro-batches",
    "answers, padded to 96",  # as tensor-parallel ranks have it
    "recomputed",
    "PP 2, answers, padded to 96",
)


@pytest.mark.parametrize("name", each_case(PADDED, PADDED[:3]))
def test_masks_padding_and_layouts_leave_the_gradient_of_a_routers_loss(measured: Measured, name: str) -> None:
    for loss, (length, error) in measured.of(name, ROUTERS).items():
        assert length == pytest.approx(1, abs=1e-4) and error < 1e-4, loss


def test_packing_leaves_the_losses_of_a_micro_batch(measured: Measured) -> None:
    """The loss by sequence takes a row for a sequence: another loss of the same weight."""
    figures = measured.of("packed to 96, answers", ROUTERS)
    for loss in ("load balancing", "over replicas", "z-loss"):
        assert figures[loss][1] < 1e-4, loss
    assert 0.7 < figures["by sequence"][0] < 1.4


REPLICAS = ("DP 2, answers, padded to 96", "EP 2, answers, padded to 96", "FSDP, answers, padded to 96")


@pytest.mark.parametrize("name", each_case(REPLICAS, REPLICAS[:1]))
def test_replicas_leave_the_gradient_of_a_routers_loss(measured: Measured, name: str) -> None:
    """The loss over replicas sees more tokens at once: another loss of the same weight."""
    figures = measured.of(name, [loss for loss in ROUTERS if name[:4] != "FSDP" or loss != "over replicas"])
    assert 0.7 < figures.pop("over replicas", (1.0, 0.0))[0] < 1.4
    for loss, (_, error) in figures.items():
        assert error < 1e-4, loss


LAID_OUT = (
    "packed to 96, answers",
    "PP 2, answers, padded to 96",
    "CP 2, answers, padded to 96",
    "DP 2, answers, padded to 96",
)


@pytest.mark.parametrize("name", each_case(LAID_OUT, LAID_OUT[:3]))
def test_the_loss_of_further_tokens_has_one_weight(measured: Measured, name: str) -> None:
    assert measured.of(name, FURTHER)["further token"][1] < 1e-4
