# SPDX-License-Identifier: Apache-2.0
"""Masked means over a global batch, whatever way it is split."""

import pytest
import torch
from megatron.core import parallel_state

from nemo2.mcore.parallel.loss import (
    MaskedTokenLossReduction,
    MaskedTokenLossReductionWithLossMask,
    OutputCollection,
    ScalarLossReduction,
    masked_token_loss,
)
from support import small_runs


def test_the_masked_sum_and_its_count():
    losses = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16)
    total, count = masked_token_loss(losses, torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
    assert (total.item(), count.item(), total.dtype, count.dtype) == (8.0, 3, torch.float32, torch.int)


def over_replicas(rank_losses: list[list[list[float]]], masks: list[list[list[float]]]) -> float:
    """Each rank reduces its own micro-batches."""
    small_runs.start_megatron()
    rank = torch.distributed.get_rank()
    reduction = MaskedTokenLossReduction()
    reports = []
    for losses, mask in zip(rank_losses[rank], masks[rank], strict=True):
        loss_mask, loss_per_token = (torch.tensor([values], device=small_runs.device()) for values in (mask, losses))
        reports.append(reduction({"loss_mask": loss_mask}, loss_per_token)[2])
    return float(reduction.reduce(reports))


def test_the_reported_loss_is_the_mean_over_all_kept_tokens_of_all_replicas(run_on_ranks):
    losses = [[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]]
    masks = [[[1.0, 1.0], [0.0, 1.0]], [[0.0, 0.0], [1.0, 0.0]]]
    kept = [1.0, 2.0, 4.0, 7.0]  # a mean of the micro-batches' means would be another number
    assert run_on_ranks(over_replicas, 2, losses, masks) == [pytest.approx(sum(kept) / len(kept))] * 2


def one_rank() -> dict[str, object]:
    small_runs.start_megatron()
    scalar, optional = ScalarLossReduction(), ScalarLossReduction(optional=True)
    mine = torch.tensor(3.0, requires_grad=True)
    loss, count, report = scalar(None, {"loss": mine})
    loss /= 4  # as the schedule does, in place
    empty = MaskedTokenLossReduction()
    nothing = empty({"loss_mask": torch.zeros(1, 2)}, torch.ones(1, 2))[2]
    return {
        "mine": float(mine.detach()), "count": int(count), "mean": float(scalar.reduce([report, {"loss": torch.tensor(5.0)}])),
        "none": optional.reduce([optional(None, None)[2]]), "predictions": optional(None, torch.ones(2))[2],
        "empty": float(empty.reduce([nothing])),
    }  # fmt: skip


def test_scalar_losses_are_averaged_and_the_users_own_tensor_stays_as_it_is(run_on_ranks):
    found = run_on_ranks(one_rank, 1)[0]
    assert found == {"mine": 3.0, "count": 1, "mean": 4.0, "none": None, "predictions": {}, "empty": 0.0}


@pytest.mark.parametrize(
    ("output", "returned"),
    [
        (torch.ones(2), r"Tensor of shape \(2,\)"),
        (None, "NoneType"),
        ({"accuracy": 1.0}, "dict"),
        ({"loss": torch.ones(2)}, r"dict with a loss of shape \(2,\)"),
    ],
)
def test_training_without_a_scalar_loss_is_an_error_that_says_what_came(output, returned):
    words = rf"training_step must return a scalar loss.* it returned {returned}\. .*training_loss_reduction"
    with pytest.raises(TypeError, match=words):
        ScalarLossReduction()(None, output)


def test_predictions_are_joined_along_the_batch_where_they_are_tensors():
    collect = OutputCollection()
    reports = [collect(None, torch.full((2,), value))[2] for value in (1.0, 2.0)]
    assert collect.reduce(reports).tolist() == [1.0, 1.0, 2.0, 2.0]
    assert collect.reduce([collect(None, "a")[2], collect(None, "b")[2]]) == ["a", "b"]
    assert collect.reduce([]) is None


@pytest.mark.parametrize("per_token", [False, True])
def test_shares_of_a_sequence_weigh_by_the_tokens_their_mask_keeps(monkeypatch, per_token):
    """Megatron-Core divides each share by its own tokens and averages; or, per token, divides the sum by all tokens."""
    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: 2)
    losses, masks = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 9.0]]), torch.tensor([[1, 1, 1], [0, 0, 1]])
    reduction = MaskedTokenLossReduction(per_token=per_token)
    shares = [
        reduction({"loss_mask": mask, "num_valid_tokens_in_ub": masks.sum()}, loss)
        for loss, mask in zip(losses, masks, strict=True)
    ]
    if per_token:
        differentiated = sum(loss for loss, _, _ in shares) / sum(tokens for _, tokens, _ in shares)
    else:
        differentiated = sum(loss / tokens for loss, tokens, _ in shares) / 2
    assert float(differentiated) == pytest.approx((1 + 2 + 3 + 9) / 4)
    reports = [report[MaskedTokenLossReduction.REPORT].tolist() for *_, report in shares]
    assert reports == [[6.0, 3.0], [9.0, 1.0]]


@pytest.mark.parametrize("options", [{}, {"validation_step": True}, {"validation_step": True, "val_drop_last": False}])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("kind", [MaskedTokenLossReduction, MaskedTokenLossReductionWithLossMask])
def test_both_masked_reductions_take_nemos_arguments_and_sum_alike(monkeypatch, kind, per_token, options):
    """Whether it is a validation's changes no sum; which batches it sees is the loader's, which reads `val_drop_last`."""
    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: 1)
    losses, mask = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[1.0, 0.0, 1.0]])
    reduction = kind(**options, per_token=per_token)
    given = losses if kind is MaskedTokenLossReduction else (losses, mask)
    batch = {"loss_mask": mask if kind is MaskedTokenLossReduction else torch.ones_like(mask)}
    loss, count, report = reduction(batch, given)
    assert (float(loss), int(count), report[reduction.REPORT].tolist()) == (5.0, 2, [5.0, 2.0])
    assert {name: getattr(reduction, name) for name in options} == options
