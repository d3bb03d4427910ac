# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of given texts under a model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from nemo2.backend import get_backend
from nemo2.errors import ConfigError
from nemo2.models.decoding import core_of, from_last_stage, logits_of_stage, refuse_another_vocabulary, refuse_layouts
from nemo2.models.generate import evaluating

Pair = tuple[Sequence[int], Sequence[int]]
"""Tokens that are given, at least one, and tokens that are asked for behind them."""


@dataclass(frozen=True)
class Score:
    """The score of the tokens that were asked for."""

    log_probs: list[float]
    greedy: bool
    """Whether each of them is the likeliest."""

    @property
    def log_prob(self) -> float:
        """The log-probability of all tokens together."""
        return sum(self.log_probs)


def score(
    model: Any, pairs: Sequence[Pair], *, vocab_size: int, max_sequence_length: int, max_batch_size: int = 8
) -> list[Score]:
    """Scores of ``pairs``, in their order, the same on every rank of the model.

    Args:
        model: A Megatron-Core model or a LightningModule around it, of any layout without context parallelism and virtual stages.
        pairs: A pair longer than the model reads loses the beginning of what is given.
        vocab_size: Columns of the logits beyond it were never trained.
        max_sequence_length: Tokens that the model reads at once.
        max_batch_size: Pairs that are read together, of similar lengths.

    Raises:
        ConfigError: a pair without given tokens, or asking for more than the model reads; more tokens than the model has rows; a
            layout that isn't carried.
    """
    core = core_of(model)
    if core is None:
        raise ConfigError(
            f"{type(model).__name__} is none of Megatron-Core's language models, whose texts can be scored."
        )
    refuse_layouts(True)
    refuse_another_vocabulary(core, vocab_size)
    for given, asked in pairs:
        if not given or not asked or len(asked) > max_sequence_length:
            raise ConfigError(
                f"{len(asked)} tokens are asked for behind {len(given)}: there must be at least one of each, and at most "
                f"{max_sequence_length} asked for, which the model reads at once."
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
    rows = [[*given, *asked][-most - 1 :] for given, asked in batch]
    tp = parallel_state.get_tensor_model_parallel_world_size()
    width = -(-max(len(row) - 1 for row in rows) // tp) * tp  # attention is causal: padding behind changes nothing
    tokens = torch.tensor([row[:-1] + [0] * (width - len(row) + 1) for row in rows], device=get_backend().device)
    logits = logits_of_stage(core, tokens)
    found = None if logits is None else torch.stack(list(_columns(logits[..., :vocab_size], batch, rows)))
    widest = max(len(asked) for _, asked in batch)
    for (_, asked), row in zip(batch, from_last_stage(found, (len(batch), widest, 2)).cpu(), strict=True):
        log_probs, likeliest = row[: len(asked)].T
        yield Score(log_probs.tolist(), bool(likeliest.all()))


def _columns(logits: Tensor, batch: Sequence[Pair], rows: Sequence[Sequence[int]]) -> Iterator[Tensor]:
    """A tensor ``[widest, 2]`` for each row: the log-probability of each token asked for, and whether it is the likeliest.

    Zeros fill the rest."""
    widest = max(len(asked) for _, asked in batch)
    for (_, asked), row, theirs in zip(batch, rows, logits, strict=True):
        mine = theirs[len(row) - 1 - len(asked) : len(row) - 1].float()
        picked = torch.tensor(asked, device=mine.device)
        log_probs = mine.log_softmax(dim=-1).gather(-1, picked[:, None])[:, 0]
        both = torch.stack([log_probs, (mine.argmax(dim=-1) == picked).float()], dim=-1)
        yield torch.nn.functional.pad(both, (0, 0, 0, widest - len(asked)))
