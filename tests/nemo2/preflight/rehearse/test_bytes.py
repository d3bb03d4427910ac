# SPDX-License-Identifier: Apache-2.0
"""A rehearsed rank against a real one, in bytes."""

from typing import Any

import pytest

from support.nightly import daily_and_nightly
from support.real_and_rehearsed import CASES, WORLD, real, rehearsed

RANKS = (0, WORLD - 1)
COMBINED = (
    "data 4, bf16",
    "data 4, sharded",
    "experts 2",
    "experts 2, gathered",
    "low-rank additions, tensor 2",
    "LoRA, pipeline 2 in 2 chunks",
    "LoRA, experts 2",
    "pipeline 2",
    "pipeline 4",
    "experts 2, tensor 2",
    "LoRA, data 4",
    "LoRA, tensor 4, sequence parallel",
    "LoRA, context 2, tensor 2",
)
"""Cases whose parts the others have."""


@pytest.fixture(scope="module", params=daily_and_nightly(CASES, [name for name in CASES if name not in COMBINED]))
def both(request: pytest.FixtureRequest, run_on_ranks: Any) -> tuple[Any, Any]:
    names = request.param
    real_ranks = run_on_ranks(real, WORLD, names, timeout=400)
    (dry,) = run_on_ranks(rehearsed, 1, names, RANKS, init_process_group=False, timeout=400)
    return real_ranks, dry


@pytest.mark.parametrize("rank", RANKS)
def test_model_state_is_what_a_real_rank_allocates_to_the_byte(both: Any, rank: int) -> None:
    ranks, dry = both
    kinds = ("parameters", "gradients", "main_parameters", "optimizer_states")
    assert ranks[rank]
    for name, real_rank in ranks[rank].items():
        assert {kind: dry[rank][name][kind] for kind in kinds} == {kind: real_rank[kind] for kind in kinds}, name
        assert real_rank["gradients"] > 0 and real_rank["optimizer_states"] > 0, name


@pytest.mark.parametrize("rank", RANKS)
def test_the_peak_of_saved_activations_is_that_of_a_real_rank(both: Any, rank: int) -> None:
    ranks, dry = both
    for name, real_rank in ranks[rank].items():
        assert dry[rank][name]["saved"] == pytest.approx(real_rank["saved"], rel=0.03), name
