# SPDX-License-Identifier: Apache-2.0
"""How well a model predicts texts, in a figure that doesn't depend on its tokenizer."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from nemo2.errors import ConfigError, DataError
from nemo2.evaluation.replicas import shared
from nemo2.models.scoring import Pair, Score, score


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """The perplexity of one or more texts."""

    nats: float
    """The negative log-likelihood of all tokens together."""
    num_tokens: int
    num_bytes: int
    """The size of the texts in UTF-8."""

    @property
    def loss(self) -> float:
        """Nats per token, as training reports them."""
        return self.nats / self.num_tokens

    @property
    def perplexity(self) -> float:
        """Per token: of two models, comparable only where they have one tokenizer."""
        return math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """Comparable between models of any tokenizers."""
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
    """The perplexity of each text; every token of it is predicted once, the first behind the tokenizer's first token.

    Args:
        model, max_batch_size: As for `nemo2.models.scoring.score`.
        tokenizer: With ``text_to_ids``, ``vocab_size``, and ``bos_id`` or ``eos_id``.
        texts: Texts longer than the model reads are read in windows.
        max_sequence_length: Tokens of a window.
        stride: New tokens that a window predicts: the smaller, the more is before each of them, and the longer it takes. None:
            as many as a window has, the last window being a whole one as well, which is lm-eval's way.
        share: Let each data-parallel replica read a part of the windows; all ranks call it with the same texts.

    Raises:
        ConfigError: a stride that no window has.
        DataError: an empty text, or a tokenizer without a first token.
    """
    if stride is not None and not 1 <= stride <= max_sequence_length:
        raise ConfigError(f"stride={stride} must be from 1 to the {max_sequence_length} tokens of a window.")
    first = next(
        (found for name in ("bos_id", "eos_id") if (found := getattr(tokenizer, name, None)) is not None), None
    )
    if first is None:
        raise DataError(f"{type(tokenizer).__name__} has neither bos_id nor eos_id, behind which a text could begin.")
    windows: list[Pair] = []
    of_text: list[int] = []
    for place, text in enumerate(texts):
        ids = list(tokenizer.text_to_ids(text))
        if not ids:
            raise DataError(f"Text {place + 1} of {len(texts)} holds no token.")
        found = list(_windows([first, *ids], max_sequence_length, stride or max_sequence_length))
        windows += found
        of_text += [place] * len(found)
    settings = {"vocab_size": tokenizer.vocab_size, "max_sequence_length": max_sequence_length}

    def scored(mine: Sequence[Pair]) -> list[Score]:
        return score(model, mine, **settings, max_batch_size=max_batch_size)

    scores = shared(windows, scored) if share else scored(windows)
    results = [Perplexity(nats=0.0, num_tokens=0, num_bytes=len(text.encode())) for text in texts]
    for place, result in zip(of_text, scores, strict=True):
        results[place] += Perplexity(nats=-result.log_prob, num_tokens=len(result.log_probs), num_bytes=0)
    return results


def _windows(ids: Sequence[int], most: int, stride: int) -> Iterator[Pair]:
    """Windows of context and of predicted tokens: all of ``ids`` but the first are predicted, each once."""
    for start in range(1, len(ids), stride):
        end = min(start + stride, len(ids))
        yield ids[max(0, end - 1 - most) : start], ids[start:end]


def text_of(file: Path) -> str:
    """
    Raises:
        DataError: it can't be read as UTF-8 text, or is empty.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} can't be read as UTF-8 text: {error}.") from None
    if not text:
        raise DataError(f"{file} is empty.")
    return text
