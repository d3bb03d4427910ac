# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's timers of a step's parts (``strategy.megatron_log_level``), created with the model and logged with
the steps.

Megatron-Core starts and stops them in its schedules and in its handling of gradients. Each stop waits for the device.
"""

import logging
from typing import Any, Optional

from megatron.core import Timers

from nemo2 import ranks

_log = logging.getLogger(__name__)


def timers_of(log_level: int) -> Optional[Timers]:
    """Timers of all parts up to ``log_level``. 1: a step's forward and backward and the work after them. 2: also
    each micro-batch. None for 0."""
    return Timers(log_level=log_level, log_option="minmax") if log_level else None


def tell_timers(timers: Any, step: int) -> None:
    """Log, on rank 0, the smallest and largest time of a rank in each part since the last call, and reset the timers.

    Every rank must call it. Does nothing without timers.
    """
    if not isinstance(timers, Timers):
        return
    names = ranks.gather(list(timers._timers))  # stages time different parts
    report = timers.get_all_timers_string(list(dict.fromkeys(name for own in names for name in own)))
    if ranks.is_rank_zero() and report:
        _log.info("Up to step %d, %s", step, report)
