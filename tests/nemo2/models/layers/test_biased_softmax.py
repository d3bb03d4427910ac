# SPDX-License-Identifier: Apache-2.0
"""A router of sigmoid scores that scores by softmax, beside the formula."""

from typing import Any

import pytest
import torch

from nemo2.models.ernie45_moe import score_by_softmax


class Router:
    def apply_z_loss(self, logits: torch.Tensor, padding_mask: Any = None) -> torch.Tensor:
        return logits


def converted(logits: torch.Tensor) -> torch.Tensor:
    router = Router()
    score_by_softmax(router)
    return router.apply_z_loss(logits)


def test_the_sigmoid_of_its_logits_is_the_softmax_and_so_is_the_gradient() -> None:
    logits = 3 * torch.randn(5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ours, expected = logits.float().requires_grad_(), logits.clone().requires_grad_()
    weights = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
    scores, softmax = converted(ours).sigmoid(), expected.softmax(dim=-1)
    torch.testing.assert_close(scores.double(), softmax, rtol=1e-5, atol=1e-7)
    (scores * weights).sum().backward()
    (softmax * weights).sum().backward()
    assert ours.grad is not None and expected.grad is not None
    torch.testing.assert_close(ours.grad.double(), expected.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("far", [30.0, 1e4])
def test_a_certain_router_has_finite_scores_and_gradients(far: float) -> None:
    logits = torch.tensor([[far, 0.0, -far]], requires_grad=True)
    scores = converted(logits).sigmoid()
    scores.sum().backward()
    assert float(scores[0, 0].detach()) == pytest.approx(1.0, abs=2e-6)
    assert logits.grad is not None and logits.grad.isfinite().all()
