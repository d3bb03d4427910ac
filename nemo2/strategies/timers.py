# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's timers of a step's parts (``strategy.megatron_log_level``): made with the model, told where steps are logged.

Megatron-Core starts and stops them in its schedules and in what it does with gradients; each stop waits for the device.
"""

import logging
from typing import Any, Optional

import torch
from megatron.core import Timers

_log = logging.getLogger(__name__)


def timers_of(log_level: int) -> Optional[Timers]:
    """Timers of all parts up to ``log_level``: 1, a step's forward and backward and what follows it; 2, each micro-batch too.
    None for 0."""
    return Timers(log_level=log_level, log_option="minmax") if log_level else None


def tell_timers(timers: Any, step: int) -> None:
    """Log, on rank 0, the least and the greatest time that a rank has spent in each part since the last call, and begin anew.
    Every rank calls it. Does nothing without timers."""
    if not isinstance(timers, Timers):
        return
    names: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(names, list(timers._timers))  # stages don't all time the same parts
    told = timers.get_all_timers_string(list(dict.fromkeys(name for own in names for name in own)))
    if torch.distributed.get_rank() == 0 and told:
        _log.info("Up to step %d, %s", step, told)
