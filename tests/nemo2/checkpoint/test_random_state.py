# SPDX-License-Identifier: Apache-2.0
"""The random streams of a checkpoint, loaded on the device that saved them and on another."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from nemo2.checkpoint import random_state
from support import small_runs


class Tracker:
    """Megatron-Core's, as far as states go."""

    def __init__(self, state: torch.Tensor) -> None:
        self.states: dict[str, Any] = {"model-parallel-rng": state}

    def get_states(self) -> dict[str, Any]:
        return dict(self.states)

    def set_states(self, states: dict[str, Any]) -> None:
        self.states = states


def saved(stream: torch.Tensor) -> dict[str, Any]:
    version, words, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "torch": torch.get_rng_state(),
        "device": None,
        "megatron": {"model-parallel-rng": stream},
    }


@pytest.mark.parametrize(
    ("here", "there", "loaded"),
    [(16, 16, True), (5056, 16, False), (16, 5056, False)],
    ids=["alike", "on a CPU", "on a GPU"],
)
def test_streams_go_on_where_they_were_saved_unless_the_device_is_of_another_kind(monkeypatch, here, there, loaded):
    """A GPU's state has 16 bytes, a CPU's 5056: neither can be set to the other's."""
    tracker = Tracker(torch.zeros(here, dtype=torch.uint8))
    tracker.states["expert-parallel-rng"] = lacking = torch.full((here,), 2, dtype=torch.uint8)
    monkeypatch.setattr(random_state, "_tracker", lambda: tracker)
    state = saved(torch.ones(there, dtype=torch.uint8))
    expected = torch.rand(1)
    random_state.load_random_state(state)
    stream = tracker.states["model-parallel-rng"]
    assert stream.numel() == here and bool(stream.all()) is loaded
    assert torch.equal(tracker.states["expert-parallel-rng"], lacking), "the checkpoint has none of it"
    assert torch.equal(torch.rand(1), expected)  # the other streams go on


def streams_of_two_ranks() -> list[float]:
    """What this rank draws after it has saved its streams, and after each way of loading them."""
    from megatron.core import tensor_parallel

    from nemo2.base.backend import get_backend
    from nemo2.mcore.parallel.groups import initialize_model_parallel, seed_random_streams
    from nemo2.mcore.parallel.layout import Layout

    get_backend().install()
    initialize_model_parallel(Layout(tp=2))
    seed_random_streams(7)

    def drawn() -> float:
        with tensor_parallel.get_cuda_rng_tracker().fork():
            return torch.rand(1, device=small_runs.device()).item()

    states = random_state.random_states()
    draws = [drawn()]
    own = random_state.own_random_state(states)
    assert own is not None
    random_state.load_random_state(own)
    of_rank_0 = states["random_state/shard_0.0_1.2"]
    return [*draws, drawn(), float(random_state.own_random_state(of_rank_0) is None)]


def test_each_tensor_parallel_rank_continues_its_own_streams(run_on_ranks):
    """Not rank 0's, with which all of them would drop the same values."""
    first, second = run_on_ranks(streams_of_two_ranks, 2)
    assert first[0] == first[1] != second[1] == second[0]
    assert first[2] == second[2] == 1.0
