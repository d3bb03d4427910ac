# SPDX-License-Identifier: Apache-2.0
"""Rows of settings that follow from each other: their order, what a user's own value does, and how conflicts are told."""

from typing import Any, Optional

import pytest

from nemo2.base.errors import ConfigError
from nemo2.config.derivations import Conflict, Derivation, Row, Setting, apply


class Settings:
    """Fields of one configuration, of which the user set some."""

    def __init__(self, values: dict[str, Any], *user: str) -> None:
        self.values, self.user = values, user
        self.why: dict[str, str] = {}

    def in_force(self, field: str) -> Setting:
        return Setting(field.rpartition(".")[2], field.rpartition(".")[0], self.values[field])

    def requested(self, field: str) -> Optional[Setting]:
        return self.in_force(field) if field in self.user else None

    def adjust(self, field: str, value: Any, why: str) -> None:
        self.values[field], self.why[field] = value, why


COPY = Derivation("a.x", "b.x")
FIXED = Derivation("a.x", "b.x", 7, "seven", lambda view: view.values["b.x"] > 1)
KEPT = Derivation("a.x", "b.x", rule="one-x", fix="Remove a.x.")
COMPUTED = Derivation("a.y", "a.x", lambda view: view.values["a.x"] + 1)


@pytest.mark.parametrize(
    ("rows", "user", "after"),
    [
        ([COPY], (), {"a.x": 2, "a.y": 0}),
        ([COPY], ("a.x",), {"a.x": 2, "a.y": 0}),
        ([FIXED], (), {"a.x": 7, "a.y": 0}),
        ([KEPT], (), {"a.x": 2, "a.y": 0}),
        ([COPY, COMPUTED], (), {"a.x": 2, "a.y": 3}),
        ([COMPUTED, COPY], (), {"a.x": 2, "a.y": 2}),
    ],
)
def test_a_row_sees_what_the_rows_before_it_derived(
    rows: list[Row], user: tuple[str, ...], after: dict[str, int]
) -> None:
    view = Settings({"a.x": 1, "a.y": 0, "b.x": 2}, *user)
    apply(rows, view)
    assert view.values == {**after, "b.x": 2}


def test_the_reason_of_a_value_is_the_rows_or_its_source() -> None:
    view = Settings({"a.x": 1, "a.y": 0, "b.x": 2})
    apply([FIXED, COMPUTED], view)
    assert view.why == {"a.x": "seven", "a.y": "a.x"}


def test_a_row_with_a_rule_refuses_another_value_of_the_users_and_changes_nothing() -> None:
    view = Settings({"a.x": 1, "b.x": 2}, "a.x")
    with pytest.raises(ConfigError, match="a.x=1 contradicts b.x=2. Remove a.x.") as refused:
        apply([KEPT], view)
    assert refused.value.rule == "one-x" and view.values["a.x"] == 1
    apply([KEPT], Settings({"a.x": 2, "b.x": 2}, "a.x"))


@pytest.mark.parametrize(
    ("user", "values", "refused"),
    [
        (("a.x", "b.x"), {}, True),
        (("a.x",), {}, False),
        (("a.x", "b.x"), {"b.x": False}, False),
        (("a.x", "b.x"), {"a.x": 1}, False),  # 1 and True are different settings
        (("a.x", "b.x"), {"on": False}, False),
    ],
)
def test_settings_conflict_where_the_user_set_each_to_its_value(
    user: tuple[str, ...], values: dict[str, Any], refused: bool
) -> None:
    row = Conflict("x-once", (("a.x", True), ("b.x", True)), "why", "Fix.", lambda view: view.values["on"])
    view = Settings({"a.x": True, "b.x": True, "on": True, **values}, *user)
    assert row.problem(view) == ("a.x=True contradicts b.x=True: why. Fix." if refused else None)
