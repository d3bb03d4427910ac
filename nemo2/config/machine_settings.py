# SPDX-License-Identifier: Apache-2.0
"""Settings that a machine can't support: changed in the configuration, and logged once."""

import logging
from collections.abc import Mapping
from typing import Any

from nemo2.config.adjust import adjust
from nemo2.place import here

_log = logging.getLogger(__name__)
_announced: set[str] = set()


def adjust_to(config: Any, overrides: Mapping[str, tuple[Any, str]]) -> dict[str, tuple[Any, str]]:
    """Set the fields of ``config`` to the required values, with the reason. Returns the fields whose requested
    values differed."""
    return {
        name: (used, why)
        for name, (used, why) in overrides.items()
        if hasattr(config, name) and adjust(config, name, used, why=why)
    }


def announce(changed: Mapping[str, tuple[Any, str]]) -> None:
    """Log one line on rank 0 for settings that this process hasn't announced before."""
    by_reason: dict[str, list[str]] = {}
    for name, (used, why) in changed.items():
        if name not in _announced:
            by_reason.setdefault(why, []).append(f"{name}={used}")
    _announced.update(changed)
    if by_reason and here().rank == 0:
        changes = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in by_reason.items())
        _log.info("Settings that this machine determines: %s.", changes)
