# SPDX-License-Identifier: Apache-2.0
"""Measures how well a model predicts texts: loss, perplexity, and bits per byte, which doesn't depend on the tokenizer."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from nemo2.base.advice import typed_as
from nemo2.base.errors import ConfigError, DataError
from nemo2.llm.evaluation.answers import shared
from nemo2.models.scoring import Pair, Score, score


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """The perplexity of one or more texts."""

    nats: float
    """The sum of the tokens' negative log-likelihoods."""
    num_tokens: int
    num_bytes: int
    """The size of the texts in UTF-8."""

    @property
    def loss(self) -> float:
        """Nats per token, as in training."""
        return self.nats / self.num_tokens

    @property
    def perplexity(self) -> float:
        """The perplexity per token. Two models are comparable only if they have the same tokenizer."""
        return math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of text, which are comparable between models with different tokenizers."""
        return self.nats / math.log(2) / self.num_bytes

    def __add__(self, other: "Perplexity") -> "Perplexity":
        return Perplexity(
            nats=self.nats + other.nats,
            num_tokens=self.num_tokens + other.num_tokens,
            num_bytes=self.num_bytes + other.num_bytes,
        )


def perplexity_of(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    max_sequence_length: int,
    stride: Optional[int] = None,
    max_batch_size: int = 8,
    share: bool = False,
) -> list[Perplexity]:
    """The perplexity of each text. The model predicts every token once, the first one from the tokenizer's ``bos_id`` or
    ``eos_id``.

    Args:
        model, max_batch_size: As in `nemo2.models.scoring.score`.
        tokenizer: A tokenizer with ``text_to_ids``, ``vocab_size``, and ``bos_id`` or ``eos_id``.
        texts: The texts. The model reads a text that is too long for it in windows.
        max_sequence_length: The number of tokens in a window.
        stride: The number of new tokens that each window predicts. A smaller stride gives each token more context and
            takes longer. None: all tokens of the window, as in lm-eval, with a last window of full length.
        share: Each data-parallel replica reads a part of the windows. All ranks must then pass the same texts.

    Raises:
        ConfigError: the stride is out of range.
        DataError: a text is empty, or the tokenizer has neither ``bos_id`` nor ``eos_id``.
    """
    refuse_stride(stride, max_sequence_length)
    windows: list[Pair] = []
    of_text: list[int] = []
    for place, ids in enumerate(tokens_of(tokenizer, texts)):
        token_id = list(_windows(ids, max_sequence_length, stride or max_sequence_length))
        windows += token_id
        of_text += [place] * len(token_id)
    settings = {"vocab_size": tokenizer.vocab_size, "max_sequence_length": max_sequence_length}

    def scored(mine: Sequence[Pair]) -> list[Score]:
        return score(model, mine, **settings, max_batch_size=max_batch_size)

    scores = shared(windows, scored) if share else scored(windows)
    results = [Perplexity(nats=0.0, num_tokens=0, num_bytes=len(text.encode())) for text in texts]
    for place, result in zip(of_text, scores, strict=True):
        results[place] += Perplexity(nats=-result.log_prob, num_tokens=len(result.log_probs), num_bytes=0)
    return results


def tokens_of(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """The ids of each text, after the one that its first token is predicted from.

    Raises:
        DataError: a text has no tokens, the tokenizer can't read it, or has neither ``bos_id`` nor ``eos_id``.
    """
    first = next(
        (token_id for name in ("bos_id", "eos_id") if (token_id := getattr(tokenizer, name, None)) is not None), None
    )
    if first is None:
        raise DataError(
            f"{type(tokenizer).__name__} has neither bos_id nor eos_id, and a text's first token is predicted from one of "
            "them. Use a tokenizer that has one."
        )
    tokenized = []
    for place, text in enumerate(texts):
        ids = list(tokenizer.text_to_ids(text))
        if not ids:
            raise DataError(
                f"Text {place + 1} of {len(texts)} has no tokens: remove it, or write at least one character."
            )
        tokenized.append([first, *ids])
    return tokenized


def refuse_stride(stride: Optional[int], max_sequence_length: int) -> None:
    """Raise ConfigError if the stride is out of range."""
    if stride is not None and not 1 <= stride <= max_sequence_length:
        raise ConfigError(
            f"{typed_as('stride', stride)} must lie between 1 and {max_sequence_length}, the tokens of a window."
        )


def _windows(ids: Sequence[int], most: int, stride: int) -> Iterator[Pair]:
    """The windows, each as context and predicted tokens. All of ``ids`` except the first are predicted once."""
    for start in range(1, len(ids), stride):
        end = min(start + stride, len(ids))
        yield ids[max(0, end - 1 - most) : start], ids[start:end]
