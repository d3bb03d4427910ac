# SPDX-License-Identifier: Apache-2.0
"""Layers of Megatron-Core and torch run on one rank of a silent world, so that figures show calls that were made."""

import contextlib
import warnings
from collections.abc import Iterator
from unittest.mock import patch

import torch
from torch import Tensor

from nemo2.preflight.rehearse.silent_group import Call, SilentGroup, listen

Made = tuple[str, tuple[int, ...]]
"""A collective's kind, and the shape of the larger of its two tensors."""


@contextlib.contextmanager
def silent(device: str = "cpu") -> Iterator[list[Made]]:
    """Megatron-Core's layers work here without a world, on the groups that they are given; gives the list of their calls."""
    from megatron.core import parallel_state
    from megatron.core.utils import GlobalMemoryBuffer

    made: list[Made] = []

    def heard(call: Call, tensors: list[Tensor]) -> None:
        made.append(
            (call.kind, max((tuple(one.shape) for one in tensors), key=lambda shape: torch.Size(shape).numel()))
        )

    with (
        patch("torch.distributed.is_initialized", lambda: True),
        patch("torch.distributed.get_rank", lambda group=None: 0),
        patch("torch.cuda.current_device", lambda: torch.device(device)),
        patch.object(parallel_state, "_GLOBAL_MEMORY_BUFFER", GlobalMemoryBuffer()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        stop = listen(heard)
        try:
            yield made
        finally:
            stop()


def group(size: int, rank: int = 0) -> SilentGroup:
    """A process group of ``size`` ranks, seen by one of them."""
    return SilentGroup(rank, size)
