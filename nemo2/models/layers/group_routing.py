# SPDX-License-Identifier: Apache-2.0
"""Ranks groups of experts by their best expert, as in DeepSeek V2 (arXiv:2405.04434, section 2.2.2).

Megatron-Core ranks a group by the sum of its best ``topk / group_topk`` scores, which is DeepSeek V3's rule
(arXiv:2412.19437, section 2.1.2). A router asks its ``router_replay`` for the choice of experts, to repeat a recorded
choice (``moe_enable_routing_replay``). This module uses that hook for another rule. Transformer Engine's fused router
has no such hook, and supports only the sum.
"""

from collections.abc import Callable
from typing import Any, Optional

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

# (scores [tokens, experts], topk, num_groups, group_topk) -> the picked scores and experts, [tokens, topk] each
Choice = Callable[..., tuple[Tensor, Tensor]]


class BestOfGroup:
    """The choice of experts of a router with groups: only experts of the ``group_topk`` groups with the largest single
    scores.

    ``recorded`` is the router's own replay, which still records and replays these choices. None: it has none.
    """

    def __init__(self, recorded: Optional[Any] = None):
        self.recorded = recorded
        self.layer_number: Optional[int] = None
        """Written by the router, where Megatron-Core numbers its layers."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: Optional[int] = None,
        group_topk: Optional[int] = None,
        default_compute_topk: Optional[Choice] = None,
    ) -> tuple[Tensor, Tensor]:
        """Scores ``[tokens, topk]`` and experts ``[tokens, topk]`` that the router picks of ``scores`` ``[tokens, experts]``."""
        assert default_compute_topk is not None, "routers pass their own choice"
        pick = default_compute_topk

        def choose(
            scores: Tensor, topk: int, num_groups: Optional[int] = None, group_topk: Optional[int] = None
        ) -> tuple[Tensor, Tensor]:
            return pick(_of_best_groups(scores, num_groups, group_topk), topk)

        if self.recorded is None:
            return choose(scores, topk, num_groups, group_topk)
        return self.recorded.get_replay_topk(scores, topk, num_groups, group_topk, choose)


def rank_groups_by_best_expert(model: nn.Module) -> None:
    """Makes every router of ``model`` rank its groups of experts by the largest score in each."""
    for module in model.modules():
        if isinstance(module, TopKRouter):
            router: Any = module
            router.router_replay = BestOfGroup(router.router_replay)


def _of_best_groups(scores: Tensor, num_groups: Optional[int], group_topk: Optional[int]) -> Tensor:
    """``scores`` ``[tokens, experts]`` with -inf outside of the ``group_topk`` groups with the largest maxima."""
    if not group_topk or not num_groups:
        return scores
    best = scores.unflatten(-1, (num_groups, -1)).amax(dim=-1)
    is_best = torch.zeros_like(best, dtype=torch.bool).scatter(1, best.topk(group_topk, dim=-1).indices, True)
    return scores.masked_fill(~is_best.repeat_interleave(scores.size(-1) // num_groups, dim=-1), float("-inf"))
