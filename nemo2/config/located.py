# SPDX-License-Identifier: Apache-2.0
"""The recorded place of a field's value, if it isn't the line of code that sets the field.

fiddle 0.3's ``custom_location`` swaps one provider for the whole process. If two threads build recipes at once, one
restores the other's provider and leaves it in place, and every later field is attributed to an unrelated file. The
provider here is installed once, and returns the place of its own thread.
"""

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Optional

from fiddle._src import history

_PLACE: ContextVar[Optional[history.Location]] = ContextVar("nemo2_place_of_history", default=None)


@contextlib.contextmanager
def recorded_at(file: str, line: int, function: Optional[str] = None) -> Iterator[None]:
    """In this context, fields that this thread sets are recorded as set at this place."""
    token = _PLACE.set(history.Location(file, line, function))
    try:
        yield
    finally:
        _PLACE.reset(token)


_LINE_OF_CODE = history._location_provider
history.add_exclude_location(os.path.normpath("nemo2/config/located.py"))
history._location_provider = lambda: _PLACE.get() or _LINE_OF_CODE()
