# SPDX-License-Identifier: Apache-2.0
"""Whether output is watched by a person."""

import os
from typing import IO


def is_terminal(stream: IO[str]) -> bool:
    """Whether a moving bar can be drawn on ``stream``."""
    return bool(getattr(stream, "isatty", lambda: False)()) and os.environ.get("TERM", "dumb") != "dumb"
