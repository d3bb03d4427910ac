# SPDX-License-Identifier: Apache-2.0
"""The place that a field's history names, where it isn't the line of code that sets the field.

fiddle 0.3's own ``custom_location`` swaps one provider for the whole process: of two threads that build recipes at once, one puts
the other's back and leaves it there, and every later field is said to be set in a file that has nothing to do with it. The
provider here is put in once, and asks for the place of its own thread.
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
    """Fields that this thread sets inside are recorded as set there."""
    token = _PLACE.set(history.Location(file, line, function))
    try:
        yield
    finally:
        _PLACE.reset(token)


def _place() -> history.Location:
    return _PLACE.get() or _LINE_OF_CODE()


_LINE_OF_CODE = history._location_provider
history.add_exclude_location(os.path.normpath("nemo2/config/located.py"))
history._location_provider = _place
