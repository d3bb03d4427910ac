# SPDX-License-Identifier: Apache-2.0
"""Which keys a query of attention sees, and what becomes of the scores."""

from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class AttentionRule:
    """The keys that a query may see besides a mask's, and the function that turns scores into weights.

    causal: a query sees itself and what stands before it.
    window: (left, right): a query sees at most `left` keys before and `right` keys after itself; -1 means all, None
        means no window.
    scale: the scores' factor.
    softcap: scores s become softcap * tanh(s / softcap) (Gemma 2, arXiv:2408.00118, section 2); None leaves them.
    """

    causal: bool
    scale: float
    window: Optional[tuple[int, int]] = None
    softcap: Optional[float] = None

    @property
    def left(self) -> Optional[int]:
        """The number of earlier positions that a query sees. None: all."""
        return None if self.window is None or self.window[0] < 0 else self.window[0]

    @property
    def right(self) -> Optional[int]:
        """The number of later positions that a query sees. None: all."""
        if self.causal:
            return 0
        return None if self.window is None or self.window[1] < 0 else self.window[1]

    def visible(self, first_query: int, num_queries: int, num_keys: int) -> tuple[int, int]:
        """The run of keys outside of which none of the queries sees any: its start and its end."""
        start = 0 if self.left is None else min(max(0, first_query - self.left), num_keys)
        end = num_keys if self.right is None else min(max(start, first_query + num_queries + self.right), num_keys)
        return start, end

    def allowed(self, offset: int, num_queries: int, num_keys: int, device: torch.device) -> Optional[Tensor]:
        """True where query i may see key j, `[num_queries, num_keys]`; None where every one may see all.

        offset: how many places the first query stands behind the first key.
        """
        ones = None
        if self.right is not None and offset + self.right < num_keys - 1:
            ones = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(offset + self.right)
        if self.left is not None and offset + num_queries - 1 - self.left > 0:
            if ones is None:
                ones = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
            ones = ones.triu(offset - self.left)
        return ones
