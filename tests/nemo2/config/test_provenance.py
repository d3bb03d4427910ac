# SPDX-License-Identifier: Apache-2.0
"""Where values come from: the steps of the user, the class and nemo2."""

import copy
import dataclasses

from nemo2.config.provenance import Step, adjust, adjusting, adjustments, note_explicit_fields, record_of
from nemo2.config.requested import explicit_fields, explicit_values, silent_changes, where_set


@dataclasses.dataclass
class Options:
    size: int = 1
    on: bool = False
    share: float = 1.0


def test_a_change_is_noted_with_its_reason() -> None:
    options = Options()
    assert adjust(options, "size", 2, why="first") and adjust(options, "size", 3, why="then")
    assert options.size == 3
    assert adjustments(options) == {"size": (Step(2, "nemo2", "first"), Step(3, "nemo2", "then"))}


def test_what_changes_nothing_is_not_noted() -> None:
    options = Options()
    assert not adjust(options, "size", 1, why="no news")
    assert adjustments(options) == {}
    assert adjust(options, "size", True, why="another type"), "1 == True, yet they are not the same setting"


def test_what_other_code_changes_is_noted_from_outside() -> None:
    options = Options()
    with adjusting(options, why="library"):
        options.size, options.on = 5, True
    assert adjustments(options) == {"size": (Step(5, "nemo2", "library"),), "on": (Step(True, "nemo2", "library"),)}


def test_copies_share_what_was_noted_before_and_nothing_after() -> None:
    options = Options()
    adjust(options, "size", 2, why="before")
    twin = copy.copy(options)
    adjust(twin, "on", True, why="after")
    assert set(adjustments(twin)) == {"size", "on"} and set(adjustments(options)) == {"size"}
    assert options != twin and Options(size=2) == options, "notes are no part of the value"


def test_the_users_step_stands_before_what_the_class_and_nemo2_made_of_it() -> None:
    options = Options(size=3)
    adjust(options, "size", 4, why="layout")
    note_explicit_fields(options, {"size": 2, "on": False}, {"size": "run.py:7"})
    steps = record_of(options).steps
    assert [(step.value, step.by, step.place) for step in steps["size"]] == [
        (2, "user", "run.py:7"),
        (4, "nemo2", None),
    ]
    assert explicit_values(options) == {"size": 2, "on": False} and where_set(options, "size") == "run.py:7"
    note_explicit_fields(options, {"on": False})
    assert explicit_fields(options) == {"on"} and where_set(options, "size") is None
    assert adjustments(options) == {"size": (Step(4, "nemo2", "layout"),)}, "an adjustment outlives its user's step"


def test_a_value_that_the_class_replaces_is_a_step_of_the_class() -> None:
    @dataclasses.dataclass
    class Rounded:
        size: int = 8

        def __post_init__(self) -> None:
            self.size = -(-self.size // 8) * 8

    rounded = Rounded(size=9)
    note_explicit_fields(rounded, {"size": 9})
    assert [(step.value, step.by) for step in record_of(rounded).steps["size"]] == [(9, "user"), (16, "class")]
    assert silent_changes("it", rounded) == []
    rounded.size = 24
    assert len(silent_changes("it", rounded)) == 1
