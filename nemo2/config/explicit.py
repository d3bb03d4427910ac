# SPDX-License-Identifier: Apache-2.0
"""Which fields of a built object its user set, as opposed to left at their defaults.

Where two settings govern one thing, the one that was set wins. A built dataclass no longer tells the two apart, so configs
note it on what they build.
"""

import contextlib
import dataclasses
from collections.abc import Iterable

from nemo2.config.capture import captured_arguments

_NOTE = "__nemo2_explicit__"


def note_explicit_fields(obj: object, names: Iterable[str]) -> None:
    """Remember on ``obj`` that its user set ``names``. Objects that can't hold a note go without."""
    with contextlib.suppress(AttributeError, TypeError):
        object.__setattr__(obj, _NOTE, frozenset(names))


def explicit_fields(obj: object) -> frozenset[str]:
    """The names that were set when ``obj`` was made: by its config, or in the call of a configurable class.

    For a dataclass instance made by hand, which doesn't say, the fields that differ from their defaults.
    """
    noted = getattr(obj, "__dict__", {}).get(_NOTE)
    if noted is not None:
        return noted
    captured = captured_arguments(obj)
    if captured is not None:
        return frozenset(captured)
    if not dataclasses.is_dataclass(obj) or isinstance(obj, type):
        return frozenset()
    return frozenset(
        field.name
        for field in dataclasses.fields(obj)
        if field.init
        and field.default is not dataclasses.MISSING
        and getattr(obj, field.name, field.default) != field.default
    )
