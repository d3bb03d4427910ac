# SPDX-License-Identifier: Apache-2.0
"""Arguments that nemo2 accepts because NeMo's or Lightning's signature has them, and that change nothing."""

import logging
from typing import Any

from nemo2.place import here

_log = logging.getLogger(__name__)
_warned: set[str] = set()


def warn_without_effect(why: str, **given: tuple[Any, Any]) -> None:
    """Warn once per argument and process, on rank 0, if an argument has another value than its default.

    Args:
        why: What happens instead, as a sentence.
        given: The value and the default of each argument.
    """
    for name, (value, default) in given.items():
        sentence = f"{name}={value!r} has no effect. {why}"
        if value != default and sentence not in _warned and here().rank == 0:
            _warned.add(sentence)
            _log.warning("%s", sentence)
