# SPDX-License-Identifier: Apache-2.0
"""Settings that nemo2 itself changes on built objects, each with its reason.

A run may need other values than its recipe has: a strategy copies its parallel sizes into the model, and a callback
turns off features that the layout can't use. Code that changes a field calls `adjust`, which sets the field and records
a note on the object. ``nemo2 explain`` shows the notes. At the first step, they distinguish announced changes from
silent ones (`nemo2.config.requested`).
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

_NOTES = "__nemo2_adjusted__"


class Adjustment(NamedTuple):
    """A change of a field: the old value, the new value, and the reason ("pipeline_model_parallel_size is 1")."""

    before: Any
    after: Any
    why: str


def adjust(obj: Any, name: str, value: Any, *, why: str) -> bool:
    """Set ``obj.name`` to ``value`` and record the change with its reason. Returns whether the value changed."""
    before = getattr(obj, name, None)
    if before is value or _equal(before, value):
        return False
    setattr(obj, name, value)
    _note(obj, name, Adjustment(before, value, why))
    return True


@contextlib.contextmanager
def adjusting(obj: Any, *, why: str) -> Iterator[None]:
    """Record every change that the code in the ``with`` block makes to fields of the dataclass ``obj``. For code of
    other libraries."""
    names = [field.name for field in dataclasses.fields(obj)]
    before = {name: getattr(obj, name, None) for name in names}
    yield
    for name in names:
        after = getattr(obj, name, None)
        if after is not before[name] and not _equal(before[name], after):
            _note(obj, name, Adjustment(before[name], after, why))


def note_own_changes(obj: Any, arguments: Mapping[str, Any]) -> None:
    """Record the fields that the constructor of the dataclass ``obj`` set to other values than its ``arguments``. The
    reason names the class."""
    if not dataclasses.is_dataclass(obj):
        return
    known = adjustments(obj)
    for name, given in arguments.items():
        made = getattr(obj, name, given)
        if made is not given and name not in known and given is not None and not _equal(made, given):
            _note(obj, name, Adjustment(given, made, f"{type(obj).__name__} makes it so"))


def adjustments(obj: object) -> dict[str, tuple[Adjustment, ...]]:
    """The notes on ``obj`` by field, oldest first."""
    return dict(getattr(obj, "__dict__", {}).get(_NOTES, {}))


def forget(obj: Any, name: str) -> None:
    """Remove the notes of one field."""
    notes = adjustments(obj)
    if notes.pop(name, None) is not None:
        object.__setattr__(obj, _NOTES, notes)


def _equal(one: Any, other: Any) -> bool:
    """Equality of value and type: True and 1 are different settings."""
    try:
        return type(one) is type(other) and bool(one == other)
    except (TypeError, ValueError, RuntimeError):  # arrays and tensors compare element by element
        return False


def _note(obj: Any, name: str, adjustment: Adjustment) -> None:
    # A new dict each time: a copy of the object must not share its later notes.
    notes = adjustments(obj)
    notes[name] = (*notes.get(name, ()), adjustment)
    with contextlib.suppress(AttributeError, TypeError):
        object.__setattr__(obj, _NOTES, notes)
