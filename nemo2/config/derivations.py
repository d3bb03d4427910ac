# SPDX-License-Identifier: Apache-2.0
"""Rows of a table by which settings follow from each other, or exclude each other.

`nemo2.mcore.settle.rows` and `nemo2.mcore.settle.overlap` have the rows. `apply` takes them in order, on a view of a run's
settings, so that a row sees what the rows before it derived. The view is a `nemo2.mcore.settle.run_settings.RunSettings`: it
has ``requested(field)`` (the user's `Setting` in force, or None), ``in_force(field)`` (the `Setting`, whoever set it)
and ``adjust(field, value, why)``.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Optional, Union

from nemo2.base.errors import ConfigError


class Setting(NamedTuple):
    """A value of a field, and the line that set it."""

    name: str
    owner: str
    """The configuration's path in the recipe ("strategy.ddp_config"), or the class of a callback."""
    value: Any
    line: Optional[str] = None

    @property
    def place(self) -> str:
        if self.owner[0].isupper():
            return f"{self.owner}({self.name}={self.value!r})"
        return f"{self.owner}.{self.name}={self.value!r}"

    def __str__(self) -> str:
        return f"{self.place} ({self.line})" if self.line else self.place


Text = Union[str, Callable[[Any], Optional[str]]]
"""A text, or a function of the view. A row whose reason is None doesn't apply."""
Condition = Callable[[Any], bool]


OF_SOURCE: Any = object()
"""Stands for the value of the field that another follows from."""


def always(view: Any) -> bool:
    return True


class Conflict(NamedTuple):
    """Settings that exclude each other. A run with all of them is refused."""

    rule: str
    """The rule's id (`nemo2.preflight.checks`)."""
    settings: tuple[Union[str, tuple[str, Any], Setting], ...]
    """The fields, or settings, that the error names. A field with a value excludes the others only if the user set it to
    this value."""
    why: Text
    fix: Text
    """Sentences that say what to change."""
    when: Condition = always
    """The other conditions of the conflict."""

    def problem(self, view: Any) -> Optional[str]:
        """The error's sentences. None: there is no conflict."""
        named = []
        for one in self.settings:
            if isinstance(one, str | Setting):
                named.append(one)
                continue
            setting = view.requested(one[0])
            if setting is None or type(setting.value) is not type(one[1]) or setting.value != one[1]:
                return None
            named.append(setting)
        why = _text(self.why, view) if self.when(view) else None
        if why is None:
            return None
        settings = " contradicts ".join(str(view.in_force(one) if isinstance(one, str) else one) for one in named)
        return f"{settings}: {why}. {_text(self.fix, view)}"


class Derivation(NamedTuple):
    """A field whose value follows from others."""

    field: str
    source: str
    """The field that it follows from. Its path is the reason where ``why`` has none."""
    value: Any = OF_SOURCE
    """The value, or a function of the view."""
    why: Text = ""
    when: Condition = always
    rule: Optional[str] = None
    """The rule's id under which another value of the user's is refused. None: the derived value replaces it."""
    fix: Text = ""

    def take(self, view: Any) -> None:
        """Derive the value.

        Raises:
            ConfigError: the user set another value, and the row has a rule.
        """
        why = _text(self.why, view) if self.when(view) else None
        if why is None:
            return
        source = view.in_force(self.source)
        value = self.value(view) if callable(self.value) else source.value if self.value is OF_SOURCE else self.value
        requested = view.requested(self.field) if self.rule else None
        if requested is not None and requested.value != value:
            raise ConfigError(f"{requested} contradicts {source}. {_text(self.fix, view)}", rule=self.rule)
        view.adjust(self.field, value, why or self.source)


Row = Union[Conflict, Derivation]


def apply(rows: Iterable[Row], view: Any) -> None:
    """Apply the rows in order.

    Raises:
        ConfigError: conflicts. The message has all of those that are next to each other in the table.
    """
    problems: list[tuple[str, str]] = []
    for row in (*rows, None):
        if isinstance(row, Conflict):
            if problem := row.problem(view):
                problems.append((row.rule, problem))
        elif problems:
            raise ConfigError("\n".join(text for _, text in problems), rules=[rule for rule, _ in problems])
        elif row is not None:
            row.take(view)


def _text(text: Text, view: Any) -> Optional[str]:
    return text if isinstance(text, str) else text(view)
