# SPDX-License-Identifier: Apache-2.0
"""What ranks tell each other, and that one rank's failure ends all of them."""

from typing import Any

import pytest
import torch

from nemo2.base import ranks
from nemo2.base.errors import CheckpointError, ConfigError, DataError


def exchanged() -> dict[str, Any]:
    number = torch.distributed.get_rank()
    order: list[str] = []

    def work() -> int:
        order.append(f"rank {number}")
        return number

    return {
        "own": (ranks.rank(), ranks.world_size(), ranks.is_rank_zero()),
        "gather": ranks.gather(number),
        "broadcast": ranks.broadcast({"from": number}),
        "largest": ranks.largest(torch.tensor([number, -number])).tolist(),
        "together": ranks.together(work, error=DataError),
        "on_rank_zero": ranks.on_rank_zero(lambda: number, error=DataError),
        "in_turn": ranks.in_turn(work, first=number == 1, error=DataError),
    }


def test_values_reach_every_rank(run_on_ranks: Any) -> None:
    for number, found in enumerate(run_on_ranks(exchanged, 2)):
        assert found == {
            "own": (number, 2, number == 0),
            "gather": [0, 1],
            "broadcast": {"from": 0},
            "largest": [1, 0],
            "together": number,
            "on_rank_zero": 0,
            "in_turn": number,
        }


def test_a_process_alone_is_the_only_rank() -> None:
    assert (ranks.rank(), ranks.world_size(), ranks.is_rank_zero()) == (0, 1, True)
    assert ranks.gather("a") == ["a"] and ranks.broadcast("a") == "a"
    assert ranks.in_turn(lambda: "a", first=True, error=DataError) == "a"
    with pytest.raises(OSError, match="full"):
        ranks.on_rank_zero(full, error=DataError)


def full() -> None:
    raise OSError("full")


def failures() -> list[tuple[str, str]]:
    number = torch.distributed.get_rank()

    def fail(error: Exception, *, on: int) -> None:
        if number == on:
            raise error

    found = []
    for call in (
        lambda: ranks.together(lambda: fail(ConfigError("a=1"), on=1), error=CheckpointError),
        lambda: ranks.together(lambda: fail(OSError("full"), on=1), error=CheckpointError),
        lambda: ranks.on_rank_zero(lambda: fail(ConfigError("a=1"), on=0), error=CheckpointError),
        lambda: ranks.on_rank_zero(lambda: fail(OSError("full"), on=0), error=CheckpointError),
        lambda: ranks.in_turn(lambda: fail(DataError("none"), on=0), first=number == 0, error=CheckpointError),
        lambda: ranks.in_turn(lambda: fail(DataError("none"), on=1), first=number == 0, error=CheckpointError),
    ):
        try:
            call()
        except Exception as error:
            found.append((type(error).__name__, str(error)))
    assert ranks.gather(number) == [0, 1]  # none of them left a rank behind
    return found


def test_one_rank_s_failure_ends_all_with_its_class_and_reason(run_on_ranks: Any) -> None:
    first, second = run_on_ranks(failures, 2)
    assert first == [
        ("ConfigError", "a=1 (found by rank 1)"),
        ("CheckpointError", "Rank 1 failed: OSError: full"),
        ("ConfigError", "a=1"),
        ("OSError", "full"),
        ("DataError", "none"),
        ("DataError", "none (found by rank 1)"),
    ]
    assert second == [
        ("ConfigError", "a=1"),
        ("OSError", "full"),
        ("ConfigError", "a=1"),
        ("CheckpointError", "Rank 0 failed: OSError: full"),
        ("DataError", "none (found by rank 0)"),
        ("DataError", "none"),
    ]
