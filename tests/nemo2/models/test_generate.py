# SPDX-License-Identifier: Apache-2.0
"""Sampling against hand-computed distributions, and generation that does not depend on how the model is cut."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo2.base.errors import ConfigError, DataError
from nemo2.models.generate import generate
from nemo2.models.sampling import Sampling
from support import small_runs
from support.uncached import decode_without_cache

__all__ = ["decode_without_cache"]


class Letters:
    """One token per letter; z ends a text."""

    vocab_size = 26
    eos_id = 25

    def text_to_ids(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def ids_to_text(self, ids: list[int]) -> str:
        return "".join(chr(ord("a") + i) for i in ids)


class NextLetter(torch.nn.Module):
    """A model that counts: after each letter comes the next one. Rows past the vocabulary look tempting."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(*tokens.shape, 32)
        logits.scatter_(-1, (tokens + 1).clamp(max=25).unsqueeze(-1), 5.0)
        logits[..., 26:] = 99.0
        return logits


next_letter = NextLetter()


@pytest.mark.parametrize(
    ("prompts", "settings", "expected"),
    [
        (["a", "uvw"], {"max_new_tokens": 4}, [("bcde", False), ("xy", True)]),
        (["ab", "abcdefgh"], {"max_new_tokens": 3}, [("cde", False), ("ijk", False)]),
        (["a", "abc"], {"max_new_tokens": 9, "max_sequence_length": 4}, [("bcd", False), ("d", False)]),
    ],
)
def test_greedy_generation_follows_the_model_and_stops_at_its_end_or_the_longest_sequence(
    prompts: list[str], settings: dict[str, int], expected: list[tuple[str, bool]]
) -> None:
    results = generate(next_letter, Letters(), prompts, temperature=0, **settings)
    assert [(one.text, one.finished) for one in results] == expected
    ended = [*Letters().text_to_ids(expected[1][0]), *([Letters.eos_id] if expected[1][1] else [])]
    assert results[1].token_ids == ended


@pytest.mark.parametrize(("ends", "expected"), [([3, 25], "bc"), (4, "bcd"), (None, "bcdef")])
def test_the_end_tokens_beside_the_tokenizer_s_files_end_texts(tmp_path: Path, ends: Any, expected: str) -> None:
    letters: Any = Letters()
    letters.pretrained_model_name = tmp_path
    (tmp_path / "tokenizer.json").touch()
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    (found,) = generate(next_letter, letters, ["a"], temperature=0, max_new_tokens=5)
    assert (found.text, found.finished) == (expected, ends is not None)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "z"}')
    with pytest.raises(DataError, match="eos_token_id='z'"):
        generate(next_letter, letters, ["a"])


def test_sampling_is_repeatable_by_its_seed_and_batches_change_nothing() -> None:
    def texts(**settings: Any) -> list[str]:
        prompts = ["a", "abcdef", "xy", "c"]
        results = generate(next_letter, Letters(), prompts, max_new_tokens=8, temperature=3.0, **settings)
        return [result.text for result in results]

    assert texts(seed=1) == texts(seed=1) == texts(seed=1, max_batch_size=2) != texts(seed=2)


def frequencies(**settings: Any) -> list[float]:
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.1])
    rows = probabilities.log().expand(20_000, 4)
    picked = Sampling(**settings).draw(rows, [torch.Generator().manual_seed(0)] * len(rows))
    return (torch.bincount(picked, minlength=4) / len(picked)).tolist()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.5, 0.25, 0.15, 0.1]),
        ({"temperature": 0}, [1, 0, 0, 0]),
        ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 0.6}, [2 / 3, 1 / 3, 0, 0]),  # 0.5 does not reach 0.6: the token that crosses it belongs
        ({"top_p": 0.5}, [1, 0, 0, 0]),
        ({"temperature": 0.5}, [0.25 / 0.345, 0.0625 / 0.345, 0.0225 / 0.345, 0.01 / 0.345]),
        ({"min_p": 0.31}, [2 / 3, 1 / 3, 0, 0]),  # 0.15 is less than 0.31 of 0.5
        ({"top_k": 3, "top_p": 0.8}, [2 / 3, 1 / 3, 0, 0]),  # of what top_k left: 0.556 + 0.278 reach 0.8
    ],
)
def test_tokens_are_drawn_from_the_narrowed_distribution(settings: dict[str, Any], expected: list[float]) -> None:
    assert frequencies(**settings) == pytest.approx(expected, abs=0.015)


@pytest.mark.parametrize(
    ("prompts", "settings", "words"),
    [
        ([""], {}, "has no tokens"),
        ("abc", {}, "prompts must be a list"),
        (["abcd"], {"max_sequence_length": 4}, "a prompt and its continuation may have 4 tokens together"),
        (["a"], {"temperature": -1.0}, "temperature=-1.0: must be 0"),
        (["a"], {"temperature": 1e-300}, "temperature=1e-300: must be 0"),  # which is 0 in 32 bits
        (["a"], {"top_p": 0.0}, "top_p=0.0: must be above 0"),
        (["a"], {"min_p": 1.0}, "min_p=1.0: must be from 0"),
        (["a"], {"max_new_tokens": 0}, "max_new_tokens=0: must be a whole number"),
        (["a"], {"max_batch_size": 0}, "max_batch_size=0: must be a whole number of at least 1, or None"),
    ],
)
def test_impossible_settings_are_refused(prompts: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        generate(next_letter, Letters(), prompts, **settings)


def test_a_text_ends_before_a_stop_word_and_is_told_in_pieces_without_it() -> None:
    told: list[tuple[int, str]] = []
    results = generate(
        next_letter, Letters(), ["a", "mno"], max_new_tokens=6, temperature=0, stop=["fgh", "rs"],
        on_text=lambda place, text: told.append((place, text)),
    )  # fmt: skip
    assert [(r.text, r.finished) for r in results] == [("bcdefg", False), ("pq", True)]
    assert ["".join(text for place, text in told if place == row) for row in (0, 1)] == ["bcdefg", "pq"]
    assert told[0] == (0, "b")


def texts_of_a_model(tp: int, sequence_parallel: bool, **settings: Any) -> tuple[list[str], bool]:
    from nemo2.models.llama import LlamaConfig

    small_runs.start_megatron(seed=5, tensor_model_parallel_size=tp)
    config = LlamaConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, ffn_hidden_size=64, seq_length=32, vocab_size=32,
        tensor_model_parallel_size=tp, sequence_parallel=sequence_parallel, init_method_std=0.5,
        use_cpu_initialization=True,  # the same weights whatever the cut
    )  # fmt: skip
    model = config.configure_model(None)
    results = generate(model, Letters(), ["abc", "hello"], max_new_tokens=6, **settings)
    larger = SimpleNamespace(vocab_size=33, text_to_ids=lambda text: [32])
    with pytest.raises(ConfigError, match="The tokenizer has 33 tokens, but the model's embedding has 32 rows"):
        generate(model, larger, ["abc"])
    return [r.text for r in results], model.training


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"temperature": 1.5, "top_k": 9, "top_p": 0.9, "seed": 4}])
def test_two_tensor_parallel_ranks_write_what_one_rank_writes(run_on_ranks: Any, settings: dict[str, Any]) -> None:
    (alone,) = run_on_ranks(texts_of_a_model, 1, 1, False, **settings)
    assert alone[1], "the model was left in evaluation mode"
    assert len(set(alone[0][0])) > 1
    for sequence_parallel in (False, True):
        assert run_on_ranks(texts_of_a_model, 2, 2, sequence_parallel, **settings) == [alone, alone]


def refusal_of_a_cut_sequence() -> str:
    from megatron.core import parallel_state

    from nemo2.models.decoding import refuse_layouts

    parallel_state.initialize_model_parallel(context_parallel_size=2)
    try:
        refuse_layouts()
    except ConfigError as error:
        return str(error)
    return "not refused"


def test_context_parallelism_is_refused(run_on_ranks: Any) -> None:
    assert all("context_parallel_size=1" in text for text in run_on_ranks(refusal_of_a_cut_sequence, 2))


def test_a_tokenizer_without_an_end_token_runs_to_the_limit() -> None:
    letters = Letters()
    endless = SimpleNamespace(vocab_size=26, text_to_ids=letters.text_to_ids, ids_to_text=letters.ids_to_text)
    assert generate(next_letter, endless, ["x"], max_new_tokens=4, temperature=0)[0].text == "yzzz"
