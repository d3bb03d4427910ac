# SPDX-License-Identifier: Apache-2.0
"""The further losses of multi-token prediction over context-parallel ranks; whole models are rows of the parity table."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

MASK = [1, 1, 0, 1, 1, 0, 0, 1]
# Two ranks hold one chunk from each end: tokens 0, 1, 6, 7 and tokens 2 to 5.
SHARES = ([0, 1, 6, 7], [2, 3, 4, 5])


def weights_of(mask: list[int], per_token: bool) -> list[float]:
    """Losses of this rank's share, for a second and a third token."""
    from megatron.core import parallel_state

    from nemo2.backend import get_backend
    from nemo2.models.layers.mtp import FurtherLosses

    get_backend().install()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    config = SimpleNamespace(mtp_num_layers=2, calculate_per_token_loss=per_token)
    groups = SimpleNamespace(cp=parallel_state.get_context_parallel_group())
    chunk = SimpleNamespace(
        config=config, pg_collection=groups, compute_language_model_loss=lambda labels, logits: logits
    )
    further = FurtherLosses(chunk)
    share = torch.tensor([[mask[place] for place in SHARES[torch.distributed.get_rank()]]], dtype=torch.float32)
    labels = torch.zeros_like(share)
    further.look_at_the_batch(None, (), {"labels": labels, "loss_mask": share})
    ones = torch.ones_like(share)
    weights = [float(further.loss(labels.clone(), ones).mean()) for _ in range(2)]
    assert torch.equal(further.loss(labels, ones), ones), "the model's own loss is left alone"
    return weights


def both_ways() -> tuple[list[float], list[float]]:
    return weights_of(MASK, False), weights_of(MASK, True)


def test_a_share_weighs_by_the_further_tokens_that_its_mask_keeps(run_on_ranks: Any) -> None:
    found = run_on_ranks(both_ways, 2)
    # Shifted by one the mask keeps tokens 0, 2, 3 and 6; by two, 1, 2 and 5.
    kept = [[2, 1], [2, 2]]
    own, totals, whole = [3, 2], [4, 3], 5
    for rank, (means, per_token) in enumerate(found):
        assert means == pytest.approx([2 * kept[rank][n] / totals[n] for n in range(2)])
        expected = [kept[rank][n] / own[rank] * whole / totals[n] for n in range(2)]
        assert per_token == pytest.approx(expected)


def test_a_share_without_tokens_has_a_gradient_of_zero_whatever_is_divided_by_them() -> None:
    from nemo2.models.layers.mtp import _Weighted

    losses = torch.ones(4, requires_grad=True)
    (_Weighted.apply(losses, torch.zeros(())) / torch.zeros(())).sum().backward()
    assert losses.grad is not None and torch.equal(losses.grad, torch.zeros(4))
