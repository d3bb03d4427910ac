# SPDX-License-Identifier: Apache-2.0
"""Text from a trained GPT: token by token, the whole sequence again for each (no key-value cache).

Right for looking at what a model learned; serving belongs to an inference engine. Works with tensor and sequence
parallelism: every rank of a tensor-parallel group must call ``generate`` with the same arguments, and each gets the
same text.
"""

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from torch import Tensor, nn

from nemo2.backend import get_backend
from nemo2.errors import ConfigError
from nemo2.overlap.userbuffers import without_userbuffers

# tokens [batch, sequence], position ids [batch, sequence] -> logits [batch, sequence, vocabulary / tp]
Forward = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A prompt and its continuation."""

    prompt: str
    text: str
    """The continuation, without the prompt and without the end token."""
    token_ids: list[int]
    """The continuation's tokens, the end token included where there is one."""
    finished: bool
    """True where the model ended the text itself; False where a limit did."""


def generate(
    model: nn.Module | Forward,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 128,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    max_sequence_length: int | None = None,
) -> list[Generation]:
    """Continues every prompt.

    ``model`` is a Megatron GPT (its ``eval`` mode is entered and left again), a ``GPTModel``, or any function of
    tokens and position ids that returns this rank's logits. ``temperature=0`` always takes the likeliest token;
    ``top_k=0`` and ``top_p=1`` do not narrow the choice. The random numbers depend on ``seed`` alone. A text ends at
    the tokenizer's ``eos_id``, after ``max_new_tokens``, or where prompt and continuation together reach
    ``max_sequence_length`` (None: no limit).

    Raises:
        ConfigError: a setting is out of range, a prompt is empty or too long, or the model is cut by pipeline or
            context parallelism.
    """
    _check(prompts, max_new_tokens, temperature, top_k, top_p)
    prompt_ids = [list(tokenizer.text_to_ids(prompt)) for prompt in prompts]
    for prompt, ids in zip(prompts, prompt_ids, strict=True):
        if not ids:
            raise ConfigError(f"The prompt {prompt!r} holds no token: write at least one character.")
        if max_sequence_length is not None and len(ids) >= max_sequence_length:
            raise ConfigError(
                f"A prompt of {len(ids)} tokens leaves no room in the model's {max_sequence_length}: shorten it."
            )
    limits = [len(ids) + max_new_tokens for ids in prompt_ids]
    if max_sequence_length is not None:
        limits = [min(limit, max_sequence_length) for limit in limits]

    rows = [list(ids) for ids in prompt_ids]
    finished = [False] * len(rows)
    end_of_text = getattr(tokenizer, "eos_id", None)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad(), _evaluating(model):
        forward = _forward_of(model)
        while unfinished := [i for i, row in enumerate(rows) if not finished[i] and len(row) < limits[i]]:
            logits = _next_logits(forward, rows, tokenizer.vocab_size)
            picked = sample(logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
            for i in unfinished:
                rows[i].append(int(picked[i]))
                finished[i] = rows[i][-1] == end_of_text
    return [
        _as_generation(tokenizer, prompt, row[len(ids) :], done)
        for prompt, ids, row, done in zip(prompts, prompt_ids, rows, finished, strict=True)
    ]


def sample(logits: Tensor, *, temperature: float, top_k: int, top_p: float, generator: torch.Generator) -> Tensor:
    """One token id per row of ``logits`` ``[batch, vocabulary]``, on the CPU; see :func:`generate` for the settings.

    ``top_p`` keeps the smallest set of likeliest tokens whose probabilities reach it (Holtzman et al. 2019,
    arXiv:1904.09751), after ``temperature`` and ``top_k`` were applied.
    """
    logits = logits.float().cpu()
    if temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits / temperature
    if top_k:
        smallest_kept = logits.topk(min(top_k, logits.shape[-1])).values[..., -1:]
        logits = logits.masked_fill(logits < smallest_kept, float("-inf"))
    if top_p < 1:
        ordered, order = logits.sort(descending=True)
        probabilities = ordered.softmax(dim=-1)
        # The probability of everything likelier: the token that crosses the threshold still belongs to the set.
        ordered = ordered.masked_fill(probabilities.cumsum(dim=-1) - probabilities >= top_p, float("-inf"))
        logits = torch.full_like(logits, float("-inf")).scatter(-1, order, ordered)
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator).squeeze(-1)


def _next_logits(forward: Forward, rows: list[list[int]], vocab_size: int) -> Tensor:
    """Logits ``[batch, vocab_size]`` of each row's next token, whole on every rank."""
    tp = parallel_state.get_tensor_model_parallel_world_size() if parallel_state.is_initialized() else 1
    longest = max(len(row) for row in rows)
    # Attention is causal, so padding on the right changes nothing; sequence parallelism needs a multiple of tp.
    width = -(-longest // tp) * tp
    device = get_backend().device
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=torch.long, device=device)
    position_ids = torch.arange(width, device=device).expand_as(tokens).contiguous()
    logits = forward(tokens, position_ids)
    last = torch.tensor([len(row) - 1 for row in rows], device=logits.device)
    logits = logits[torch.arange(len(rows), device=logits.device), last]
    if tp > 1:
        logits = gather_from_tensor_model_parallel_region(logits.contiguous())
    # Rows that only pad the vocabulary were never trained.
    return logits[:, :vocab_size]


def _forward_of(model: nn.Module | Forward) -> Forward:
    if parallel_state.is_initialized():
        for axis, size in (
            ("pipeline_model_parallel_size", parallel_state.get_pipeline_model_parallel_world_size()),
            ("context_parallel_size", parallel_state.get_context_parallel_world_size()),
        ):
            if size > 1:
                raise ConfigError(f"generate works with {axis}=1, this model runs with {size}: load it with 1.")
    if not isinstance(model, nn.Module):
        return model
    module: Any = model
    return lambda tokens, position_ids: module(tokens, position_ids, None)


@contextmanager
def _evaluating(model: nn.Module | Forward):
    if not isinstance(model, nn.Module):
        yield
        return
    was_training = model.training
    model.eval()
    try:
        with without_userbuffers(model):
            yield
    finally:
        model.train(was_training)


def _as_generation(tokenizer: Any, prompt: str, token_ids: list[int], finished: bool) -> Generation:
    text = tokenizer.ids_to_text(token_ids[:-1] if finished else token_ids)
    return Generation(prompt=prompt, text=text, token_ids=token_ids, finished=finished)


def _check(prompts: Sequence[str], max_new_tokens: int, temperature: float, top_k: int, top_p: float) -> None:
    if isinstance(prompts, str) or not prompts:
        raise ConfigError("prompts must be a list of at least one text.")
    for name, value, rule, holds in (
        ("max_new_tokens", max_new_tokens, "at least 1", max_new_tokens >= 1),
        ("temperature", temperature, "0 (always the likeliest token) or more", temperature >= 0),
        ("top_k", top_k, "0 (off) or more", top_k >= 0),
        ("top_p", top_p, "above 0 and at most 1 (off)", 0 < top_p <= 1),
    ):
        if not holds:
            raise ConfigError(f"{name}={value} must be {rule}.")
