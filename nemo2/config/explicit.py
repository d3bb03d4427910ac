# SPDX-License-Identifier: Apache-2.0
"""The fields of a built object that its user set: their values, and where they were set.

If two settings govern the same value, the explicit one wins. A built dataclass no longer knows which fields were
explicit, so configs note it on the objects that they build.
"""

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from nemo2.config.adjust import adjustments, note_own_changes
from nemo2.config.capture import captured_arguments, made_at

_NOTE = "__nemo2_explicit__"
_ABSENT = object()


class _Note:
    """The explicit fields with their values, and the known places. A value of None: the field is explicit, and its
    value unknown."""

    def __init__(self, values: dict[str, Any], places: dict[str, str]) -> None:
        self.values = values
        self.places = places

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Note":
        return self  # never changed


def note_explicit_fields(
    obj: object, names: "Iterable[str] | Mapping[str, Any]", places: Mapping[str, str] | None = None
) -> None:
    """Record on ``obj`` that its user set ``names`` (a mapping also records the values) in these ``places``
    ("file:line").

    Objects that can't hold a note are left unchanged.
    """
    if isinstance(names, Mapping):
        note_own_changes(obj, names)
    values = dict(names) if isinstance(names, Mapping) else {name: getattr(obj, name, _ABSENT) for name in names}
    with contextlib.suppress(AttributeError, TypeError):
        object.__setattr__(obj, _NOTE, _Note(values, dict(places or {})))


def explicit_fields(obj: object) -> frozenset[str]:
    """The names that were set when ``obj`` was made: by its config, or in the call of a configurable class.

    For a dataclass instance made directly, which has no record, the fields that differ from their defaults and that
    have no announced adjustment (`nemo2.config.adjust`).
    """
    return frozenset(explicit_values(obj))


def explicit_values(obj: object) -> dict[str, Any]:
    """The names of `explicit_fields` with their original values, even if they have changed since."""
    noted = getattr(obj, "__dict__", {}).get(_NOTE)
    if noted is not None:
        return {name: value for name, value in noted.values.items() if value is not _ABSENT}
    captured = captured_arguments(obj)
    if captured is not None:
        return captured
    if not dataclasses.is_dataclass(obj) or isinstance(obj, type):
        return {}
    changed = adjustments(obj)
    first = {name: steps[0].before for name, steps in changed.items()}
    now = {f.name: first.get(f.name, getattr(obj, f.name, f.default)) for f in dataclasses.fields(obj) if f.init}
    defaults = {f.name: f.default for f in dataclasses.fields(obj) if f.default is not dataclasses.MISSING}
    return {name: value for name, value in now.items() if name in defaults and value != defaults[name]}


def where_set(obj: object, name: str) -> str | None:
    """The "file:line" that set ``name`` of a built object. None: unknown."""
    noted = getattr(obj, "__dict__", {}).get(_NOTE)
    if noted is not None and name in noted.places:
        return noted.places[name]
    place = made_at(obj)
    return f"{place[0]}:{place[1]}" if place is not None and noted is None else None


def at(obj: object, name: str) -> str:
    """ " (file:line)" of the code that set ``name`` of a built object, for a sentence. Empty: unknown."""
    place = where_set(obj, name)
    return f" ({place})" if place else ""
