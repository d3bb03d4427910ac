# SPDX-License-Identifier: Apache-2.0
"""GarbageCollectionCallback: when it collects, and that it leaves the collector as it was."""

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from nemo2.callbacks import GarbageCollectionCallback


@pytest.fixture(autouse=True)
def collector_is_on() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    generations: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda generation=2: generations.append(generation))
    return generations


def test_making_one_changes_nothing():
    GarbageCollectionCallback(gc_interval_train=1, gc_interval_val=1)
    assert gc.isenabled()


def test_it_collects_at_its_steps_and_only_there(collected):
    callback: Any = GarbageCollectionCallback(gc_interval_train=3, gc_interval_val=2)
    callback.on_train_start(None, None)
    assert not gc.isenabled()
    collected.clear()
    for step in range(1, 8):
        callback.on_train_batch_end(SimpleNamespace(global_step=step), None, None, None, step - 1)
    assert collected == [1, 1]  # after steps 3 and 6
    callback.on_validation_start(None, None)
    for batch in range(5):
        callback.on_validation_batch_end(None, None, None, None, batch)
    assert collected == [1, 1, 2, 1, 1]  # everything at the start, then after batches 2 and 4


@pytest.mark.parametrize("ending", ["on_train_end", "on_exception"])
def test_the_collector_is_on_again_however_training_ends(ending, collected):
    callback: Any = GarbageCollectionCallback(1, 1)
    callback.on_train_start(None, None)
    callback.on_exception(None, None, RuntimeError()) if ending == "on_exception" else callback.on_train_end(None, None)
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off(collected):
    gc.disable()
    callback: Any = GarbageCollectionCallback(1, 1)
    callback.on_train_start(None, None)
    callback.on_train_end(None, None)
    assert not gc.isenabled()


def test_validation_outside_training_is_left_alone(collected):
    callback: Any = GarbageCollectionCallback(1, 1)
    callback.on_validation_start(None, None)
    callback.on_validation_batch_end(None, None, None, None, 0)
    assert collected == []
