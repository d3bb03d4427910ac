# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a run tell each other: every exchange of Python objects, and whether all of them succeeded.

Every rank of the group must make each call, in the same order. Without a process group there is one rank.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from nemo2.base.errors import Nemo2Error

T = TypeVar("T")


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_rank_zero() -> bool:
    return rank() == 0


def gather(value: T, *, group: Any = None) -> list[T]:
    """Every rank's value, on every rank. ``group``: of these ranks only, in its order."""
    size = world_size() if group is None else group.size()
    values = [value] * size
    if size > 1:
        dist.all_gather_object(values, value, group=group)
    return values


def broadcast(value: T) -> T:
    """Rank 0's value, on every rank."""
    values = [value]
    if world_size() > 1:
        dist.broadcast_object_list(values, src=0)
    return values[0]


def largest(values: Tensor, *, group: Any = None) -> Tensor:
    """The largest of each element over all ranks, in place."""
    if world_size() > 1:
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    return values


def together(work: Callable[[], T], *, error: type[Nemo2Error]) -> T:
    """Call ``work`` on every rank and return this rank's result.

    Raises:
        Exception: the error of ``work`` on this rank, unchanged. If only other ranks failed, the first one's: nemo2's own
            with its class, any other as ``error``.
    """
    result, failure = _outcome(work)
    for number, other in enumerate(gather(_description(failure))):
        if failure is None and other is not None:
            cls, text = other
            raise cls(f"{text} (found by rank {number})") if cls else error(f"Rank {number} failed: {text}")
    if failure is not None:
        raise failure
    return result  # pyright: ignore[reportReturnType]  (without a failure there is one)


def on_rank_zero(work: Callable[[], T], *, error: type[Nemo2Error]) -> T:
    """Call ``work`` on rank 0 and return its result, which must be picklable, on every rank.

    Raises:
        Exception: as `together`.
    """
    result, failure = _outcome(work) if is_rank_zero() else (None, None)
    result, description = broadcast((result, _description(failure)))
    if failure is not None:
        raise failure
    if description is not None:
        raise description[0](description[1]) if description[0] else error(f"Rank 0 failed: {description[1]}")
    return result  # pyright: ignore[reportReturnType]  (without a failure there is one)


def in_turn(work: Callable[[], T], *, first: bool, error: type[Nemo2Error]) -> T:
    """Call ``work`` on the ranks that are ``first``, such as one of each node, and then on all others.

    Raises:
        Exception: as `together`. If a first rank fails, the others aren't called.
    """
    result = together(lambda: work() if first else None, error=error)
    return together(lambda: result if first else work(), error=error)  # pyright: ignore[reportReturnType]


_Description = tuple[type[Nemo2Error] | None, str]
"""An error for other ranks: its class if it is nemo2's, and its text. Others may not be picklable."""


def _outcome(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as failure:  # any error: the other ranks must receive it first
        return None, failure


def _description(failure: Exception | None) -> _Description | None:
    if failure is None:
        return None
    if isinstance(failure, Nemo2Error):
        return type(failure), str(failure)
    return None, f"{type(failure).__name__}: {failure}"
