# SPDX-License-Identifier: Apache-2.0
"""Computes the log-probabilities of given texts under a model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from nemo2.base.backend import get_backend
from nemo2.base.errors import ConfigError
from nemo2.models.decoding import from_last_stage, logits_of_stage, refuse_another_vocabulary, required_core
from nemo2.models.generate import evaluating

Pair = tuple[Sequence[int], Sequence[int]]
"""Context tokens, at least one, and the tokens after them to score."""


@dataclass(frozen=True)
class Score:
    """The score of the requested tokens."""

    log_probs: list[float]
    greedy: bool
    """Whether each of them is the likeliest token."""

    @property
    def log_prob(self) -> float:
        """The log-probability of all tokens together."""
        return sum(self.log_probs)


def score(
    model: Any, pairs: Sequence[Pair], *, vocab_size: int, max_sequence_length: int, max_batch_size: int = 8
) -> list[Score]:
    """The scores of ``pairs``, in their order, the same on every rank of the model.

    Args:
        model: A Megatron-Core model or a LightningModule around it, of any layout without context parallelism and
            virtual stages.
        pairs: Pairs of context and tokens. In a pair that is too long for the model, the beginning of the context is
            cut off.
        vocab_size: The number of trained columns of the logits.
        max_sequence_length: The model's longest input, in tokens.
        max_batch_size: Pairs that are processed together, of similar lengths.

    Raises:
        ConfigError: a pair without context, or with more requested tokens than the model's longest input; more tokens
            than rows of the model; or an unsupported layout.
    """
    core = required_core(model)
    refuse_another_vocabulary(core, vocab_size)
    for context, continuation in pairs:
        if not context or not continuation or len(continuation) > max_sequence_length:
            raise ConfigError(
                f"pairs: {len(continuation)} tokens are to be scored after {len(context)} tokens of context. Each pair needs at "
                f"least one token of context, and from 1 to {max_sequence_length} tokens to score (max_sequence_length)."
            )
    order = sorted(range(len(pairs)), key=lambda place: len(pairs[place][0]) + len(pairs[place][1]))
    scores: dict[int, Score] = {}
    with torch.no_grad(), evaluating(model):
        for start in range(0, len(order), max_batch_size):
            places = order[start : start + max_batch_size]
            batch = [pairs[place] for place in places]
            scores |= zip(places, _scored(core, batch, vocab_size, max_sequence_length), strict=True)
    return [scores[place] for place in range(len(pairs))]


def _scored(core: Any, batch: Sequence[Pair], vocab_size: int, most: int) -> Iterator[Score]:
    rows = [[*context, *continuation][-most - 1 :] for context, continuation in batch]
    tp = parallel_state.get_tensor_model_parallel_world_size()
    width = -(-max(len(row) - 1 for row in rows) // tp) * tp  # attention is causal: padding behind changes nothing
    tokens = torch.tensor([row[:-1] + [0] * (width - len(row) + 1) for row in rows], device=get_backend().device)
    logits = logits_of_stage(core, tokens)
    columns = None if logits is None else torch.stack(list(_columns(logits[..., :vocab_size], batch, rows)))
    widest = max(len(continuation) for _, continuation in batch)
    for (_, continuation), row in zip(batch, from_last_stage(columns, (len(batch), widest, 2)).cpu(), strict=True):
        log_probs, likeliest = row[: len(continuation)].T
        yield Score(log_probs.tolist(), bool(likeliest.all()))


def _columns(logits: Tensor, batch: Sequence[Pair], rows: Sequence[Sequence[int]]) -> Iterator[Tensor]:
    """A tensor ``[widest, 2]`` for each row: the log-probability of each requested token, and whether it is the
    likeliest. Padded with zeros."""
    widest = max(len(continuation) for _, continuation in batch)
    for (_, continuation), row, theirs in zip(batch, rows, logits, strict=True):
        mine = theirs[len(row) - 1 - len(continuation) : len(row) - 1].float()
        picked = torch.tensor(continuation, device=mine.device)
        log_probs = mine.log_softmax(dim=-1).gather(-1, picked[:, None])[:, 0]
        both = torch.stack([log_probs, (mine.argmax(dim=-1) == picked).float()], dim=-1)
        yield torch.nn.functional.pad(both, (0, 0, 0, widest - len(continuation)))
