# SPDX-License-Identifier: Apache-2.0
"""Announced changes of built objects."""

import copy
import dataclasses

from nemo2.config.adjust import Adjustment, adjust, adjusting, adjustments


@dataclasses.dataclass
class Options:
    size: int = 1
    on: bool = False
    share: float = 1.0


def test_a_change_is_noted_with_its_reason() -> None:
    options = Options()
    assert adjust(options, "size", 2, why="first") and adjust(options, "size", 3, why="then")
    assert options.size == 3
    assert adjustments(options) == {"size": (Adjustment(1, 2, "first"), Adjustment(2, 3, "then"))}


def test_what_changes_nothing_is_not_noted() -> None:
    options = Options()
    assert not adjust(options, "size", 1, why="no news")
    assert adjustments(options) == {}
    assert adjust(options, "size", True, why="another type"), "1 == True, yet they are not the same setting"


def test_what_other_code_changes_is_noted_from_outside() -> None:
    options = Options()
    with adjusting(options, why="library"):
        options.size, options.on = 5, True
    assert adjustments(options) == {"size": (Adjustment(1, 5, "library"),), "on": (Adjustment(False, True, "library"),)}


def test_copies_share_what_was_noted_before_and_nothing_after() -> None:
    options = Options()
    adjust(options, "size", 2, why="before")
    twin = copy.copy(options)
    adjust(twin, "on", True, why="after")
    assert set(adjustments(twin)) == {"size", "on"} and set(adjustments(options)) == {"size"}
    assert options != twin and Options(size=2) == options, "notes are no part of the value"
