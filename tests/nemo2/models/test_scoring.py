# SPDX-License-Identifier: Apache-2.0
"""Scores of texts beside transformers' own model, at several layouts; perplexity over windows."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo2.base.errors import ConfigError, DataError
from nemo2.llm.evaluation.perplexity import _windows, perplexity_of
from support import hf_parity as parity
from support.hf_models import ROWS, VOCABULARY

ROW = next(row for row in ROWS if row.name.startswith("Llama 3.1"))
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP 2, SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "PP 2": {"pipeline_model_parallel_size": 2},
}
MOST = 16


class Numbers:
    """Tokens written as letters from A on; 0 begins a text."""

    vocab_size = VOCABULARY
    bos_id = 0

    def text_to_ids(self, text: str) -> list[int]:
        return [ord(letter) - 65 for letter in text]


def pairs() -> list[tuple[list[int], list[int]]]:
    generator = torch.Generator().manual_seed(2)
    draw = lambda count: torch.randint(0, VOCABULARY, (count,), generator=generator).tolist()  # noqa: E731
    return [(draw(given), draw(asked)) for given, asked in ((1, 1), (5, 3), (9, 7), (30, 4), (2, 11))]


def texts() -> list[str]:
    return ["".join(chr(65 + (place * step) % 50) for place in range(length)) for length, step in ((3, 1), (40, 7))]


def asked_of(root: str, layout: dict[str, Any]) -> dict[str, Any]:
    from nemo2.models.scoring import score

    parity.start(**layout)
    released = parity.Released(Path(root))
    chunk = released.chunk(released.config(**layout))
    likeliest = [tuple(pair) for pair in json.loads((Path(root) / "likeliest.json").read_text())]
    scores = score(chunk, pairs() + likeliest, vocab_size=VOCABULARY, max_sequence_length=MOST, max_batch_size=2)
    found = {
        stride: perplexity_of(chunk, Numbers(), texts(), max_sequence_length=MOST, stride=stride)
        for stride in (None, 5)
    }
    return {"scores": [(one.log_probs, one.greedy) for one in scores], "perplexity": found}


def theirs(root: str) -> list[tuple[list[float], bool]]:
    model = parity.make(ROW, Path(root))
    likeliest = [
        (given, [int(model(torch.tensor([given]), use_cache=False).logits[0, -1].argmax())]) for given in ([3], [3, 9])
    ]
    (Path(root) / "likeliest.json").write_text(json.dumps(likeliest))
    found = []
    for given, asked in pairs() + likeliest:
        row = [*given, *asked][-MOST - 1 :]
        with torch.no_grad():
            logits = model(torch.tensor([row[:-1]]), use_cache=False).logits[0, -len(asked) :].float()
        picked = torch.tensor(asked)
        log_probs = logits.log_softmax(-1).gather(-1, picked[:, None])[:, 0]
        found.append((log_probs.tolist(), bool((logits.argmax(-1) == picked).all())))
    return found


@pytest.fixture(scope="module")
def released(run_on_ranks: Any, tmp_path_factory: Any) -> tuple[Path, list[Any]]:
    root = tmp_path_factory.mktemp("scoring")
    return root, run_on_ranks(theirs, 1, str(root))[0]


@pytest.fixture(scope="module")
def alone(run_on_ranks: Any, released: Any) -> dict[str, Any]:
    return run_on_ranks(asked_of, 1, str(released[0]), {})[0]


def test_texts_have_the_log_probabilities_that_transformers_gives_them(alone: Any, released: Any) -> None:
    for (ours, greedy), (expected, expected_greedy) in zip(alone["scores"], released[1], strict=True):
        assert ours == pytest.approx(expected, abs=1e-4)
        assert greedy == expected_greedy
    assert [greedy for _, greedy in alone["scores"][-2:]] == [True, True]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_changes_no_score(run_on_ranks: Any, alone: Any, released: Any, layout: str) -> None:
    for found in run_on_ranks(asked_of, 2, str(released[0]), LAYOUTS[layout]):
        for (ours, greedy), (expected, same) in zip(found["scores"], alone["scores"], strict=True):
            assert ours == pytest.approx(expected, abs=1e-4)
            assert greedy == same


def test_every_token_of_a_text_is_predicted_once_and_a_stride_gives_each_more_before_it(alone: Any) -> None:
    whole, strided = alone["perplexity"][None], alone["perplexity"][5]
    for results in (whole, strided):
        assert [result.num_tokens for result in results] == [3, 40]
        assert [result.num_bytes for result in results] == [len(text.encode()) for text in texts()]
    assert whole[0].nats == pytest.approx(strided[0].nats, rel=1e-5)  # one window
    assert whole[1].nats != pytest.approx(strided[1].nats, rel=1e-3)
    both = whole[0] + whole[1]
    assert both.loss == pytest.approx(both.nats / 43)
    assert both.bits_per_byte == pytest.approx(both.nats / math.log(2) / both.num_bytes)
    assert both.perplexity == pytest.approx(math.exp(both.loss))


def test_windows_are_those_of_lm_eval() -> None:
    # The example in the documentation of lm-eval's `loglikelihood_rolling`: P is the prefix, windows have 4 tokens.
    found = list(_windows(["P", *range(10)], 4, 4))  # pyright: ignore[reportArgumentType]
    read = [[*given, *asked][:-1] for given, asked in found]
    assert read == [["P", 0, 1, 2], [3, 4, 5, 6], [5, 6, 7, 8]]
    assert [list(asked) for _, asked in found] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


class Silent:
    vocab_size = 4

    def text_to_ids(self, text: str) -> list[int]:
        return [1] * len(text)


@pytest.mark.parametrize(
    ("tokenizer", "settings", "error", "words"),
    [
        (Numbers(), {"stride": 99}, ConfigError, "stride=99 must lie between 1 and 16"),
        (Silent(), {}, DataError, "Silent has neither bos_id nor eos_id"),
        (Numbers(), {"texts": ["A", ""]}, DataError, "Text 2 of 2 has no tokens"),
    ],
)
def test_what_cannot_be_measured_is_refused(tokenizer: Any, settings: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        perplexity_of(None, tokenizer, **{"texts": ["A"], "max_sequence_length": MOST, **settings})
