# SPDX-License-Identifier: Apache-2.0
"""Generates text with a trained GPT, token by token, for several prompts at once.

Use it to see what a model has learned. For serving, use an inference engine. Every rank of a tensor-, pipeline- and
expert-parallel group must call ``generate`` with the same arguments, and each gets the same text.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nemo2.base.backend import get_backend
from nemo2.base.counts import require_counts
from nemo2.base.errors import ConfigError
from nemo2.data.tokenizer_files import end_ids_of
from nemo2.mcore.overlap.userbuffers import without_userbuffers
from nemo2.models.decoding import (
    CachedDecoder,
    agreed,
    refuse_another_vocabulary,
    required_core,
    with_plain_products,
    without_sequence_parallelism,
)
from nemo2.models.sampling import Sampling

_UNFINISHED_LETTER = "\N{REPLACEMENT CHARACTER}"
"""Tokenizers decode an incomplete character to this, until its remaining bytes arrive."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A prompt and its continuation."""

    prompt: str
    text: str
    """The continuation, without the prompt, the end token and the stop word."""
    token_ids: list[int]
    """The continuation's tokens, including the end token if there is one."""
    finished: bool
    """True if the model ended the text itself or wrote a stop word. False if a limit ended it."""
    log_probs: list[float]
    """The log-probability of each of ``token_ids`` under the model, before temperature and filtering."""

    @property
    def generated_text(self) -> str:
        """``text``, under Megatron-Core's name."""
        return self.text


@dataclass
class _Row:
    """A prompt that is being continued."""

    prompt: str
    ids: list[int]
    limit: int
    generator: torch.Generator
    new: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finished: bool = False
    text: str = ""

    @property
    def goes_on(self) -> bool:
        return not self.finished and len(self.ids) + len(self.new) < self.limit

    def at(self, position: int) -> int:
        """The token at a position. Beyond the end: 0, which is never used."""
        if position < len(self.ids):
            return self.ids[position]
        return self.new[position - len(self.ids)] if position - len(self.ids) < len(self.new) else 0


def generate(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[str | Sequence[int]],
    *,
    max_new_tokens: int = 128,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    stop: Sequence[str] = (),
    max_sequence_length: int | None = None,
    max_batch_size: int | None = None,
    on_text: Callable[[int, str], None] | None = None,
    add_bos: bool = False,
    end_ids: Sequence[int | None] = (),
) -> list[Generation]:
    """Continue every prompt.

    Args:
        model: A Megatron GPT or hybrid, which is in ``eval`` mode during the call, or a ``GPTModel``.
        tokenizer: A tokenizer with ``text_to_ids``, ``ids_to_text``, ``vocab_size``, and ``eos_id`` if texts end.
        prompts: Texts, or their tokens, of any lengths. The prompts of a batch are processed together up to the length
            of the shortest, then token by token.
        max_new_tokens: The largest number of new tokens per prompt.
        temperature, top_k, top_p, min_p: See `Sampling`.
        seed: The seed. A prompt's random numbers depend only on the seed and the prompt's index in ``prompts``, not on
            the layout or the batch.
        stop: Words that end a continuation. The text ends before the first of them.
        max_sequence_length: The largest length of prompt and continuation together. None: no limit.
        max_batch_size: Prompts that are continued together. None: all.
        on_text: A function that is called with a prompt's index and each new piece of its continuation.
        add_bos: Begin each prompt with the tokenizer's begin-of-sequence token.
        end_ids: Tokens that end a text, beside the tokenizer's (`end_ids_of`).

    Raises:
        DataError: an error of `end_ids_of`.
        ConfigError: an error of `read_prompts`; a setting is out of range; the tokenizer has more tokens than the
            model; or the model's layout doesn't support generation.
    """
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    require_counts("", max_new_tokens=max_new_tokens)
    core = required_core(model)
    refuse_another_vocabulary(core, tokenizer.vocab_size)
    ids = read_prompts(tokenizer, prompts, max_sequence_length=max_sequence_length, add_bos=add_bos)
    rows = _rows(tokenizer, prompts, ids, max_new_tokens, max_sequence_length, seed)
    ends = end_ids_of(tokenizer) | {*end_ids}
    by_length = sorted(range(len(rows)), key=lambda index: len(rows[index].ids))
    size = len(rows) if max_batch_size is None else max_batch_size
    require_counts("", others=(None,), max_batch_size=max_batch_size)
    with torch.no_grad(), evaluating(model), without_sequence_parallelism(core), with_plain_products(core):
        for start in range(0, len(rows), size):
            places = by_length[start : start + size]
            batch = [rows[place] for place in places]
            longest = max(row.limit for row in batch)
            decoder = CachedDecoder(core, batch_size=len(batch), max_sequence_length=longest)
            for row in _continue(decoder, batch, tokenizer.vocab_size, sampling, ends):
                _write(row, tokenizer, stop, None if on_text is None else partial(on_text, places[batch.index(row)]))
    return [
        Generation(prompt=row.prompt, text=row.text, token_ids=row.new, finished=row.finished, log_probs=row.log_probs)
        for row in rows
    ]


def read_prompts(
    tokenizer: Any,
    prompts: Sequence[str | Sequence[int]],
    *,
    max_sequence_length: int | None = None,
    add_bos: bool = False,
) -> list[list[int]]:
    """The tokens of each prompt. The arguments are those of `generate`; no model is needed.

    Raises:
        ConfigError: there are no prompts; or a prompt is empty, leaves no room for a new token, or has a token that the
            tokenizer lacks.
    """
    if isinstance(prompts, str) or not prompts:
        raise ConfigError("prompts must be a list with at least one prompt.")
    begin = [_first_token(tokenizer)] if add_bos else []
    records = []
    for place, prompt in enumerate(prompts, start=1):
        subject = "The prompt" if len(prompts) == 1 else f"Prompt {place} of {len(prompts)}"
        ids = list(tokenizer.text_to_ids(prompt) if isinstance(prompt, str) else prompt)
        if not begin + ids:
            raise ConfigError(
                f"{subject} has no tokens, and generation needs at least one: write at least one character."
            )
        if max_sequence_length is not None and len(begin + ids) >= max_sequence_length:
            raise ConfigError(
                f"{subject} has {len(begin + ids)} tokens, and a prompt and its continuation may have "
                f"{max_sequence_length} tokens together. Shorten the prompt to at most {max_sequence_length - 1} tokens."
            )
        if strange := [token for token in ids if not 0 <= token < tokenizer.vocab_size]:
            raise ConfigError(
                f"{subject} has the token id {strange[0]}, but the tokenizer's ids range from 0 to {tokenizer.vocab_size - 1}."
            )
        records.append(begin + ids)
    return records


def _continue(
    decoder: CachedDecoder, rows: list[_Row], vocab_size: int, sampling: Sampling, ends: Collection[int | None]
) -> Iterator[_Row]:
    """Yield each row after each of its new tokens. A token of ``ends`` finishes the row."""
    position = min(len(row.ids) for row in rows)
    logits = decoder.feed(_tokens([row.ids[:position] for row in rows]))
    while True:
        # Rows that pad the vocabulary were never trained.
        logits = logits[:, :vocab_size]
        writing = [place for place, row in enumerate(rows) if position >= len(row.ids) and row.goes_on]
        if writing:
            theirs = logits[writing]
            picked = agreed(sampling.draw(theirs, [rows[place].generator for place in writing]))
            log_probs = theirs.log_softmax(dim=-1).cpu().gather(-1, picked[:, None])[:, 0]
            for place, token, log_prob in zip(writing, picked.tolist(), log_probs.tolist(), strict=True):
                rows[place].new.append(token)
                rows[place].log_probs.append(log_prob)
                rows[place].finished = token in ends
                yield rows[place]
        if not any(row.goes_on for row in rows):
            return
        logits = decoder.feed(_tokens([[row.at(position)] for row in rows]))
        position += 1


def _write(row: _Row, tokenizer: Any, stop: Sequence[str], tell: Callable[[str], None] | None) -> None:
    """Update a row's text to its tokens. A stop word ends the text."""
    if row.goes_on and not stop and tell is None:
        return  # the text is needed only at the end
    text = tokenizer.ids_to_text(row.new[:-1] if row.finished else row.new)
    if positions := [text.index(word) for word in stop if word in text]:
        text, row.finished = text[: min(positions)], True
    if row.goes_on:  # hold back what may begin a stop word or a character
        held = max((len(word) for word in stop), default=1) - 1
        text = text.rstrip(_UNFINISHED_LETTER)[: max(0, len(text) - held)]
    if tell is not None and text.startswith(row.text) and text != row.text:
        tell(text[len(row.text) :])
    row.text = text


def _first_token(tokenizer: Any) -> int:
    first = getattr(tokenizer, "bos_id", None)
    if first is None:
        raise ConfigError(
            f"add_BOS=True: {type(tokenizer).__name__} has no begin-of-sequence token. Set add_BOS=False."
        )
    return first


def _rows(
    tokenizer: Any,
    prompts: Sequence[str | Sequence[int]],
    ids: list[list[int]],
    max_new_tokens: int,
    max_sequence_length: int | None,
    seed: int,
) -> list[_Row]:
    rows = []
    for place, (prompt, theirs) in enumerate(zip(prompts, ids, strict=True)):
        text = prompt if isinstance(prompt, str) else tokenizer.ids_to_text(list(prompt))
        limit = min(len(theirs) + max_new_tokens, max_sequence_length or len(theirs) + max_new_tokens)
        generator = torch.Generator().manual_seed((seed * 1_000_003 + place) % 2**63)
        rows.append(_Row(prompt=text, ids=theirs, limit=limit, generator=generator))
    return rows


def _tokens(rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.long, device=get_backend().device)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context with ``model`` in ``eval`` mode and without userbuffers, which have the size of a training micro-batch."""
    were_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with without_userbuffers(model):
            yield
    finally:
        for module in were_training:  # restore each module: some of them may be frozen
            module.training = True
