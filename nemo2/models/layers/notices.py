# SPDX-License-Identifier: Apache-2.0
"""Notices of layers, logged once per process, on rank 0 only."""

import functools
import logging

from nemo2.base import ranks

_log = logging.getLogger(__name__)


@functools.cache
def say_once(message: str) -> None:
    if ranks.is_rank_zero():
        _log.warning("%s", message)
