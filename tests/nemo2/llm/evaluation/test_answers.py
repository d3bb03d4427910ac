# SPDX-License-Identifier: Apache-2.0
"""Answers of a model that survive an interruption: none is asked for twice, and none is lost or mixed up."""

import errno
from collections.abc import Sequence
from typing import Any

import pytest
from megatron.core import parallel_state

from nemo2.llm.evaluation.answers import Answers

REQUESTS = [f"{'word ' * (place % 7)}{place}" for place in range(150)]


@pytest.fixture(autouse=True)
def one_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda: 1)


class Model:
    """Answers with the length of a request; stops after so many calls."""

    def __init__(self, *, calls: int = 100) -> None:
        self.calls, self.asked = calls, []

    def __call__(self, requests: Sequence[Any]) -> list[int]:
        if self.calls == 0:
            raise KeyboardInterrupt
        self.calls -= 1
        self.asked += requests
        return [len(request) for request in requests]


def test_a_disk_that_is_full_ends_no_evaluation(tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("nemo2.llm.evaluation.answers.append", full)
    answers = Answers(tmp_path / "answers.jsonl").to("texts", REQUESTS, Model())
    assert answers == [len(request) for request in REQUESTS]
    assert caplog.text.count("No space left on device") == 1


def test_an_interrupted_evaluation_asks_only_for_what_is_left(tmp_path):
    file, first, second = tmp_path / "deep" / "answers.jsonl", Model(calls=1), Model()
    with pytest.raises(KeyboardInterrupt):
        Answers(file).to("texts", REQUESTS, first)
    with open(file, "a") as lines:
        lines.write('["cut o')
    answers = Answers(file)
    assert answers.to("texts", REQUESTS, second) == [len(request) for request in REQUESTS]
    assert len(first.asked) == 64 and sorted(first.asked + second.asked) == sorted(REQUESTS)
    third = Model()
    assert Answers(file).to("texts", REQUESTS, third) == [len(request) for request in REQUESTS]
    assert third.asked == []


def test_the_same_words_of_another_kind_are_another_request_and_repeated_ones_are_asked_once():
    model, told = Model(), []
    answers = Answers(on_progress=lambda: told.append(1))
    assert answers.to("texts", ["a", "bb", "a"], model) == [1, 2, 1]
    assert answers.to("scores", ["a"], model) == [1]
    assert model.asked == ["a", "bb", "a"] and len(told) == 2
