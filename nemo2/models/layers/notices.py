# SPDX-License-Identifier: Apache-2.0
"""Notices of layers, logged once per process, on rank 0 only."""

import functools
import logging

import torch

_log = logging.getLogger(__name__)


@functools.cache
def say_once(message: str) -> None:
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        _log.warning("%s", message)
