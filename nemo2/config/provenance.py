# SPDX-License-Identifier: Apache-2.0
"""Where the values of a built object come from: one record per object, with the call that made it and the steps of each
of its fields.

The user sets a field, the class may replace the value when it is made, and nemo2 may adjust it to the layout or the
machine. Each is a `Step`. If two settings govern one value, the one that the user set wins; ``nemo2 show --explain`` shows the
steps; and at the first step of a run a value that is nobody's last step stops it (`nemo2.config.requested`).
"""

import contextlib
import dataclasses
import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, NamedTuple, Optional

_RECORD = "__nemo2_provenance__"


class Step(NamedTuple):
    """One value of a field."""

    value: Any
    by: Literal["default", "user", "class", "nemo2"]
    why: str = ""
    """The reason of a change ("pipeline_model_parallel_size is 1")."""
    place: Optional[str] = None
    """The "file:line" of a user's step. None: unknown."""


class Call(NamedTuple):
    """The call of a configurable class that made an object."""

    place: tuple[str, int]
    """The file and line of the call."""
    arguments: Optional[dict[str, Any]] = None
    """The arguments that were passed, by name. None: the constructor is running, or the arguments have no names."""
    attributes: Mapping[str, Any] = {}
    """The object's plain attributes when the constructor ended (`nemo2.config.capture`)."""


class Record(NamedTuple):
    """What is known of an object. Never changed, so that copies of the object share it."""

    steps: Mapping[str, tuple[Step, ...]] = {}
    """The steps of each field, oldest first."""
    knows_user: bool = False
    """Whether the user's fields are recorded: a field without a step of the user's has its default."""
    call: Optional[Call] = None
    """None: no call of a configurable class made the object."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Record":
        return self  # the arguments may be large

    def __reduce__(self) -> tuple[Any, ...]:
        return (Record, (self.steps, self.knows_user))  # a loader's worker doesn't get the arguments


def line_of_caller(skipping: Collection[str] = ()) -> tuple[str, int]:
    """The file and line that called the function which asks, for messages. No other module looks at frames, and nothing
    is decided by them. ``skipping``: files whose callers are asked for instead."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename in skipping:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def note_call(obj: object, call: Call) -> None:
    """Record the call that makes or made ``obj``."""
    _write(obj, record_of(obj)._replace(call=call))


def note_explicit_fields(obj: object, values: Mapping[str, Any], places: Optional[Mapping[str, str]] = None) -> None:
    """Record on ``obj`` that its user set fields to ``values``, of which the class may have made others, in these
    ``places`` ("file:line")."""
    note_own_changes(obj, values)
    steps: dict[str, tuple[Step, ...]] = {
        name: tuple(step._replace(by="default") if step.by == "user" else step for step in old)
        for name, old in record_of(obj).steps.items()
    }
    for name, value in values.items():
        later = steps.get(name, ())
        if later and later[0].by == "default":
            later = later[1:]
        steps[name] = (Step(value, "user", place=(places or {}).get(name)), *later)
    _write(obj, record_of(obj)._replace(steps=steps, knows_user=True))


def adjust(obj: Any, name: str, value: Any, *, why: str) -> bool:
    """Set ``obj.name`` to ``value`` and record the change with its reason. Returns whether the value changed."""
    before = getattr(obj, name, None)
    if is_same(before, value):
        return False
    setattr(obj, name, value)
    _add(obj, name, before, Step(value, "nemo2", why))
    return True


def adjust_to(config: Any, overrides: Mapping[str, tuple[Any, str]]) -> dict[str, tuple[Any, str]]:
    """Set the fields of ``config`` to the required values, with the reason. Returns the fields whose requested
    values differed."""
    return {
        name: (used, why)
        for name, (used, why) in overrides.items()
        if hasattr(config, name) and adjust(config, name, used, why=why)
    }


@contextlib.contextmanager
def adjusting(obj: Any, *, why: str) -> Iterator[None]:
    """Record every change that the code in the ``with`` block makes to fields of the dataclass ``obj``. For code of
    other libraries."""
    names = [field.name for field in dataclasses.fields(obj)]
    before = {name: getattr(obj, name, None) for name in names}
    yield
    for name in names:
        after = getattr(obj, name, None)
        if not is_same(before[name], after):
            _add(obj, name, before[name], Step(after, "nemo2", why))


def note_own_changes(obj: Any, arguments: Mapping[str, Any]) -> None:
    """Record the fields that the constructor of the dataclass ``obj`` set to other values than its ``arguments``. The
    reason names the class."""
    if not dataclasses.is_dataclass(obj):
        return
    recorded = adjustments(obj)
    for name, requested in arguments.items():
        value = getattr(obj, name, requested)
        if name not in recorded and requested is not None and not is_same(value, requested):
            _add(obj, name, requested, Step(value, "class", f"{type(obj).__name__} makes it so"))


def adjustments(obj: object) -> dict[str, tuple[Step, ...]]:
    """The steps of the fields of ``obj`` that the class and nemo2 took, oldest first."""
    return {name: steps[1:] for name, steps in record_of(obj).steps.items() if steps[1:]}


def is_same(one: Any, other: Any) -> bool:
    """Whether two values of a setting are the same, by value and type, also inside lists, tuples and dicts: True, 1 and
    1.0 are different settings. ``nan`` is the same as ``nan``."""
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(value, other[key]) for key, value in one.items())
    return is_equal(one, other)


def is_equal(one: Any, other: Any) -> bool:
    """Whether two values are equal, also of different types: 1 equals 1.0."""
    try:
        return bool(one == other) or bool(one != one and other != other)  # nan
    except (TypeError, ValueError, RuntimeError):  # arrays and tensors compare element by element
        return False


def record_of(obj: object) -> Record:
    return getattr(obj, "__dict__", {}).get(_RECORD) or Record()


def _add(obj: Any, name: str, before: Any, step: Step) -> None:
    record = record_of(obj)
    steps = record.steps.get(name) or (Step(before, "default"),)
    _write(obj, record._replace(steps={**record.steps, name: (*steps, step)}))


def _write(obj: object, record: Record) -> None:
    with contextlib.suppress(AttributeError, TypeError):  # objects that can't hold a record have none
        # Not by the __setattr__ of nn.Module and of frozen dataclasses.
        object.__setattr__(obj, _RECORD, record)
