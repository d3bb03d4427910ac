# SPDX-License-Identifier: Apache-2.0
"""A process group whose other ranks do not exist: every collective returns at once and is recorded.

torch's fake backend doesn't report which group was used, and lacks two coalesced collectives for meta tensors that
Megatron-Core's gradient buckets call. Outputs on meta need no data. Outputs on the CPU (object collectives, small
figures) have the values that they would have if every other rank had this rank's.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # pyright: ignore[reportAttributeAccessIssue]
from torch.futures import Future

BACKEND = "rehearsal"


@dataclass(frozen=True)
class Call:
    """A collective as this rank issued it."""

    kind: str
    """``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``broadcast``, ``send``, ``receive`` ..."""
    group: str
    """Megatron-Core's name of the group (its ``group_desc``). "": the world."""
    ranks: int
    """The size of the group."""
    bytes: int
    """The bytes of the larger side of the collective on this rank: the output of a gather, the input of a scatter, the
    message of a send."""


Listener = Callable[[Call, list[Tensor]], None]
_listeners: list[Listener] = []


def listen(listener: Listener) -> Callable[[], None]:
    """Call ``listener`` with every collective and its tensors. Returns a function that removes the listener."""
    _listeners.append(listener)
    return lambda: _listeners.remove(listener)


def _collective(kind: str, *, message: int = 0, filled: bool = False) -> Callable[..., Any]:
    """A method of `SilentGroup` that records a collective.

    Args:
        kind: See `Call.kind`.
        message: The index of the argument whose bytes count. The result is always the first argument.
        filled: The first argument, where it is on the CPU, gets copies of the second.
    """

    def collective(group: "SilentGroup", *tensors: Any, **options: Any) -> Any:
        if filled:
            _fill(tensors[0], tensors[1])
        return group._done(kind, tensors[message], tensors[0])

    return collective


_ProcessGroup: Any = dist.ProcessGroup  # torch 2.6 to 2.13 name its methods and their arguments differently


class SilentGroup(_ProcessGroup):
    """A process group of any size for torch.distributed, without communication."""

    def __init__(self, rank: int, size: int):
        super().__init__(rank, size)
        self._desc = ""

    def getBackendName(self) -> str:
        return BACKEND

    supports_coalescing = False

    def _get_backend(self, device: Any) -> Any:
        return self

    @property
    def pg_name(self) -> str:
        # When a group is destroyed, torch reads the name once more after it has deleted it.
        return dist.distributed_c10d._world.pg_names.get(self, "")

    group_name = pg_name

    def _done(self, kind: str, message: Any, result: Any = None) -> Any:
        tensors = _tensors(message)
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if _listeners:
            call = Call(kind=kind, group=getattr(self, "group_desc", "") or "", ranks=self.size(), bytes=size)
            for listener in _listeners:
                listener(call, tensors)
        future: Future[Any] = Future()
        future.set_result(message if result is None else result)
        return _create_work_from_future(future)

    # torch 2.13 calls some methods by a new name, ``..._single``, and older versions by the old one.
    allreduce = allreduce_coalesced = _collective("all_reduce")
    reduce = _collective("reduce")
    broadcast = _collective("broadcast")
    allgather = _allgather_base = all_gather_single = _collective("all_gather", filled=True)
    allgather_coalesced = _collective("all_gather")
    allgather_into_tensor_coalesced = all_gather_single_coalesced = _collective("all_gather")
    reduce_scatter = _reduce_scatter_base = reduce_scatter_single = _collective("reduce_scatter", message=1)
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced = _collective("reduce_scatter", message=1)
    alltoall = alltoall_base = all_to_all_single = _collective("all_to_all", message=1, filled=True)
    gather = _collective("gather", message=1)
    scatter = _collective("scatter", message=1)
    send = _collective("send")
    recv = recv_anysource = _collective("receive")

    def barrier(self, *options: Any, **more: Any) -> Any:
        return self._done("barrier", [])

    monitored_barrier = barrier


def register() -> None:
    """Register the backend for ``init_process_group("rehearsal")``, once per process."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            BACKEND, lambda store, rank, size, timeout: SilentGroup(rank, size), devices=["cpu", "meta"]
        )


def _tensors(message: Any) -> list[Tensor]:
    if isinstance(message, Tensor):
        return [message]
    return [tensor for item in message for tensor in _tensors(item)]


def _fill(output: Any, tensor: Any) -> None:
    """Fill ``output`` with copies of this rank's ``tensor``, as if the other ranks had the same. Lists are filled item by
    item, and a list with one tensor for the whole of it."""
    if not isinstance(output, Tensor):
        for part, source in zip(
            output, itertools.repeat(tensor) if isinstance(tensor, Tensor) else tensor, strict=False
        ):
            _fill(part, source)
    elif output.device.type == "cpu" and output.numel() and tensor.numel():
        repeated = tensor.detach().reshape(-1).repeat(-(-output.numel() // tensor.numel()))[: output.numel()]
        output.data.copy_(repeated.reshape(output.shape))
