# SPDX-License-Identifier: Apache-2.0
"""The ratios by which extra losses are weighed; tests/nemo2/mcore/parallel/test_extra_losses.py measures their
effect on gradients."""

from typing import Any

import pytest
import torch

from support import small_runs

MASK = [[0, 1, 1, 0, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0]]
PADDING = [[False] * 6 + [True] * 2, [False] * 3 + [True] * 5]


def ratios(batches: list[list[Any]]) -> list[float]:
    from nemo2.models.step_tokens import ALL, PRESENT, count_step_tokens, further, trained_over

    small_runs.start_megatron()
    count_step_tokens(batches[torch.distributed.get_rank()], mtp_num_layers=2)
    return [float(trained_over(name)) for name in (ALL, PRESENT, further(1), further(2))]


def batch(rows: slice, **more: Any) -> dict[str, Any]:
    return {"loss_mask": torch.tensor(MASK[rows]).float(), "padding_mask": torch.tensor(PADDING[rows]), **more}


def test_tokens_are_counted_over_micro_batches_and_replicas(run_on_ranks: Any) -> None:
    first, second = slice(0, 1), slice(1, 2)
    # 6 trained of 16, 9 without padding; 5 are not the first of their row, and 3 not among the first two.
    expected = [6 / 16, 6 / 9, 6 / 5, 6 / 3]
    assert run_on_ranks(ratios, 1, [[batch(first), batch(second)]])[0] == pytest.approx(expected)
    for rank in run_on_ranks(ratios, 2, [[batch(first)], [batch(second)]]):
        assert rank == pytest.approx(expected)


def test_each_sequence_of_a_packed_row_begins_anew(run_on_ranks: Any) -> None:
    packed = batch(slice(0, 1), cu_seqlens=torch.tensor([[0, 2, 6, -1]], dtype=torch.int32))
    # Tokens 1, 2, 4 and 5 are trained; 2 begins the second sequence, and 1 and 2 are among the first two of theirs.
    assert run_on_ranks(ratios, 1, [[packed]])[0] == pytest.approx([4 / 8, 4 / 6, 4 / 3, 4 / 2])


@pytest.mark.parametrize("unknown", [[torch.zeros(2)], [{"tokens": torch.zeros(1, 2)}]])
def test_batches_that_say_nothing_count_as_trained(run_on_ranks: Any, unknown: list[Any]) -> None:
    assert run_on_ranks(ratios, 1, [unknown])[0] == [1.0] * 4
