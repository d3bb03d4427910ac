# SPDX-License-Identifier: Apache-2.0
"""Selects the next token."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo2.base.advice import typed_as
from nemo2.base.counts import is_count
from nemo2.base.errors import ConfigError
from nemo2.config.value_types import refuse_misfits

LEAST_TEMPERATURE = 1e-6
"""The least divisor of logits in 32 bits: divided by a smaller number they may be infinite, and have no softmax."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The settings for drawing a token from the model's distribution. The filters apply in the order of the fields.

    Raises:
        ConfigError: a value is out of range.
    """

    temperature: float = 1.0
    """The divisor of the logits, at least `LEAST_TEMPERATURE`. 0 always picks the likeliest token."""
    top_k: int = 0
    """The number of likeliest tokens to keep. 0: all."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens whose probabilities reach this sum (Holtzman et al. 2019,
    arXiv:1904.09751)."""
    min_p: float = 0.0
    """Drop tokens with less than this fraction of the likeliest token's probability (Nguyen et al. 2024,
    arXiv:2407.01082). 0: keep all."""

    def __post_init__(self) -> None:
        refuse_misfits(type(self), vars(self))
        for name, rule, holds in (
            (
                "temperature",
                f"0 (always the likeliest token) or at least {LEAST_TEMPERATURE}, below which the logits overflow",
                self.temperature == 0 or self.temperature >= LEAST_TEMPERATURE,
            ),
            ("top_k", "a whole number, 0 (off) or more", is_count(self.top_k, least=0)),
            ("top_p", "above 0 and at most 1 (off)", 0 < self.top_p <= 1),
            ("min_p", "from 0 (off) to below 1", 0 <= self.min_p < 1),
        ):
            if not holds:
                raise ConfigError(f"{typed_as(name, getattr(self, name))}: must be {rule}.")

    def draw(self, logits: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        """One token id per row of ``logits`` ``[batch, vocabulary]``, on the CPU.

        Each row has its own generator, so a prompt's tokens don't depend on the other prompts of the batch.
        """
        logits = logits.float().cpu()
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        weights = self._narrowed(logits / self.temperature).softmax(dim=-1)
        drawn = [
            torch.multinomial(row, 1, generator=generator) for row, generator in zip(weights, generators, strict=True)
        ]
        return torch.cat(drawn)

    def _narrowed(self, logits: Tensor) -> Tensor:
        if self.top_k:
            smallest_kept = logits.topk(min(self.top_k, logits.shape[-1])).values[..., -1:]
            logits = logits.masked_fill(logits < smallest_kept, float("-inf"))
        if self.top_p < 1:
            ordered, order = logits.sort(descending=True)
            probabilities = ordered.softmax(dim=-1)
            # The probability of all likelier tokens: the token that crosses the threshold still belongs to the set.
            likelier = probabilities.cumsum(dim=-1) - probabilities
            ordered = ordered.masked_fill(likelier >= self.top_p, float("-inf"))
            logits = torch.full_like(logits, float("-inf")).scatter(-1, order, ordered)
        if self.min_p:
            probabilities = logits.softmax(dim=-1)
            least = self.min_p * probabilities.amax(dim=-1, keepdim=True)
            logits = logits.masked_fill(probabilities < least, float("-inf"))
        return logits
