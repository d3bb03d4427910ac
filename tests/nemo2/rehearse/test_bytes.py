# SPDX-License-Identifier: Apache-2.0
"""A rehearsed rank against a real one, in bytes."""

from typing import Any

import pytest

from support.real_and_rehearsed import CASES, WORLD, real, rehearsed

RANKS = (0, WORLD - 1)


@pytest.fixture(scope="module")
def both(run_on_ranks: Any) -> tuple[Any, Any]:
    names = list(CASES)
    real_ranks = run_on_ranks(real, WORLD, names, timeout=400)
    (dry,) = run_on_ranks(rehearsed, 1, names, RANKS, init_process_group=False, timeout=400)
    return real_ranks, dry


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("name", CASES)
def test_model_state_is_what_a_real_rank_allocates_to_the_byte(both: Any, name: str, rank: int) -> None:
    ranks, dry = both
    kinds = ("parameters", "gradients", "main_parameters", "optimizer_states")
    assert {kind: dry[rank][name][kind] for kind in kinds} == {kind: ranks[rank][name][kind] for kind in kinds}
    assert ranks[rank][name]["gradients"] > 0 and ranks[rank][name]["optimizer_states"] > 0


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("name", CASES)
def test_the_peak_of_saved_activations_is_that_of_a_real_rank(both: Any, name: str, rank: int) -> None:
    ranks, dry = both
    assert dry[rank][name]["saved"] == pytest.approx(ranks[rank][name]["saved"], rel=0.03)
