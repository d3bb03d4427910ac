# SPDX-License-Identifier: Apache-2.0
"""What the user requested of a built object, and the comparison with what is in force: a change without an announcement
stops the run."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Optional

from nemo2.base.backend.compilation import as_megatron_has_it
from nemo2.base.errors import ConfigError
from nemo2.config.provenance import adjustments, is_equal, record_of


def explicit_fields(obj: object) -> frozenset[str]:
    """The names that were set when ``obj`` was made: by its config, or in the call of a configurable class.

    For a dataclass instance made directly, which has no record, the fields that differ from their defaults and that
    nobody adjusted.
    """
    return frozenset(explicit_values(obj))


def explicit_values(obj: object) -> dict[str, Any]:
    """The names of `explicit_fields` with their original values, even if they have changed since."""
    record = record_of(obj)
    if record.knows_user:
        return {name: steps[0].value for name, steps in record.steps.items() if steps and steps[0].by == "user"}
    if record.call is not None and record.call.arguments is not None:
        return dict(record.call.arguments)
    if not dataclasses.is_dataclass(obj) or isinstance(obj, type):
        return {}
    first = {name: steps[0].value for name, steps in record.steps.items()}
    now = {f.name: first.get(f.name, getattr(obj, f.name, f.default)) for f in dataclasses.fields(obj) if f.init}
    defaults = {f.name: f.default for f in dataclasses.fields(obj) if f.default is not dataclasses.MISSING}
    return {name: value for name, value in now.items() if name in defaults and value != defaults[name]}


def where_set(obj: object, name: str) -> Optional[str]:
    """The "file:line" that set ``name`` of a built object. None: unknown."""
    record = record_of(obj)
    if record.knows_user:
        return next((step.place for step in record.steps.get(name, ()) if step.by == "user"), None)
    return "{}:{}".format(*record.call.place) if record.call is not None else None


def at(obj: object, name: str) -> str:
    """ " (file:line)" of the code that set ``name`` of a built object, for a sentence. Empty: unknown."""
    place = where_set(obj, name)
    return f" ({place})" if place else ""


def refuse_silent_changes(objects: Mapping[str, Any]) -> None:
    """Compare built configurations with the last steps of their fields. ``objects`` maps a recipe path to each.

    None requests nothing, because Megatron-Core fills it in.

    Raises:
        ConfigError: fields have neither the requested nor the announced value. The message lists all of them.
    """
    sentences = [sentence for path, obj in objects.items() if obj is not None for sentence in silent_changes(path, obj)]
    if sentences:
        raise ConfigError(
            "The settings in force are not the requested settings, and no code announced the change:\n  "
            + "\n  ".join(sentences)
            + (
                "\nCode that changes a built configuration must announce the change with "
                "nemo2.config.provenance.adjust(config, field, value, why=...)."
            )
        )


def silent_changes(path: str, obj: Any) -> list[str]:
    """A sentence for each field of ``obj`` with an unexpected value."""
    sentences = []
    requested, announced = explicit_values(obj), adjustments(obj)
    for name in dict.fromkeys([*requested, *announced]):
        changes = announced.get(name)
        expected = as_megatron_has_it(changes[-1].value if changes else requested[name])
        if not hasattr(obj, name) or (expected is None and not changes):
            continue
        current = getattr(obj, name)
        # a separate configuration is compared under its own path
        is_part = dataclasses.is_dataclass(expected) and type(expected) is type(current)
        if expected is current or is_part or is_equal(expected, current):
            continue
        place = where_set(obj, name)
        source = f"announced: {changes[-1].why}" if changes else f"set at {place}" if place else "set in the recipe"
        sentences.append(f"{path}.{name} is {current!r} instead of {expected!r} ({source})")
    return sentences
