# SPDX-License-Identifier: Apache-2.0
"""The line of code that made something, for messages. No other module looks at frames, and nothing is decided by them."""

import sys
from collections.abc import Collection


def line_of_caller(skipping: Collection[str] = ()) -> tuple[str, int]:
    """The file and line that called the function which asks. ``skipping``: files whose callers are asked for instead."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename in skipping:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
