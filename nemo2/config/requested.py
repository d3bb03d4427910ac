# SPDX-License-Identifier: Apache-2.0
"""Comparison of the requested with the effective settings: a change without an announcement stops the run."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from nemo2.config.adjust import adjustments
from nemo2.config.explicit import explicit_values, where_set
from nemo2.errors import ConfigError


def refuse_silent_changes(objects: Mapping[str, Any]) -> None:
    """Compare built configurations with their requested values. ``objects`` maps a recipe path to each.

    A field may differ from the user's value if the change was announced (`nemo2.config.adjust.adjust`), and an
    announced value must still be in place. None requests nothing, because Megatron-Core fills it in.

    Raises:
        ConfigError: fields have neither the requested nor the announced value. The message lists all of them.
    """
    found = [sentence for path, obj in objects.items() if obj is not None for sentence in silent_changes(path, obj)]
    if found:
        raise ConfigError(
            "The settings in force are not the requested settings, and no code announced the change:\n  "
            + "\n  ".join(found)
            + (
                "\nCode that changes a built configuration must announce the change with "
                "nemo2.config.adjust.adjust(config, field, value, why=...)."
            )
        )


def silent_changes(path: str, obj: Any) -> list[str]:
    """A sentence for each field of ``obj`` with an unexpected value."""
    found = []
    asked, announced = explicit_values(obj), adjustments(obj)
    for name in dict.fromkeys([*asked, *announced]):
        steps = announced.get(name)
        expected = steps[-1].after if steps else asked[name]
        if not hasattr(obj, name) or (expected is None and not steps):
            continue
        current = getattr(obj, name)
        if _same(expected, current):
            continue
        place = where_set(obj, name)
        source = f"announced: {steps[-1].why}" if steps else f"set at {place}" if place else "set in the recipe"
        found.append(f"{path}.{name} is {current!r} instead of {expected!r} ({source})")
    return found


def _same(expected: Any, current: Any) -> bool:
    if expected is current:
        return True
    if dataclasses.is_dataclass(expected) and type(expected) is type(current):
        return True  # a separate configuration, compared under its own path
    try:
        return bool(expected == current)
    except (TypeError, ValueError, RuntimeError):  # arrays and tensors compare element by element
        return False
