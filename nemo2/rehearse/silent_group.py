# SPDX-License-Identifier: Apache-2.0
"""A process group whose other ranks do not exist: every collective returns at once and is recorded.

torch's fake backend doesn't report which group was used, and lacks two coalesced collectives for meta tensors that
Megatron-Core's gradient buckets call. Outputs on meta need no data. Outputs on the CPU (object collectives, small
figures) have the values that they would have if every other rank had this rank's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
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

    @property
    def group_name(self) -> str:
        return self.pg_name

    def _done(self, kind: str, message: Any, result: Any = None) -> Any:
        tensors = _tensors(message)
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if _listeners:
            call = Call(kind=kind, group=_description(self), ranks=self.size(), bytes=size)
            for listener in _listeners:
                listener(call, tensors)
        future: Future[Any] = Future()
        future.set_result(result if result is not None else message)
        return _create_work_from_future(future)

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        return self._done("all_reduce", tensors)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        return self._done("all_reduce", tensors)

    def reduce(self, tensors: Any, opts: Any = None) -> Any:
        return self._done("reduce", tensors)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        return self._done("broadcast", tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for output, tensor in zip(outputs, inputs, strict=True):
            for part in output:
                _fill(part, tensor)
        return self._done("all_gather", outputs)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._done("all_gather", outputs)

    def _allgather_base(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        _fill(output, tensor)
        return self._done("all_gather", output)

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._done("all_gather", outputs)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._done("reduce_scatter", inputs, outputs)

    def _reduce_scatter_base(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        return self._done("reduce_scatter", tensor, output)

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._done("reduce_scatter", inputs, outputs)

    def alltoall_base(self, output: Any, tensor: Any, output_sizes: Any, input_sizes: Any, opts: Any = None) -> Any:
        _fill(output, tensor)
        return self._done("all_to_all", tensor, output)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for output, tensor in zip(outputs, inputs, strict=True):
            _fill(output, tensor)
        return self._done("all_to_all", inputs, outputs)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._done("gather", inputs, outputs)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._done("scatter", inputs, outputs)

    def send(self, tensors: Any, destination: int, tag: int = 0) -> Any:
        return self._done("send", tensors)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
        return self._done("receive", tensors)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        return self._done("receive", tensors)

    def barrier(self, opts: Any = None) -> Any:
        return self._done("barrier", [])

    monitored_barrier = barrier

    # torch 2.13 renamed these methods. Older versions call the old names.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base


def register() -> None:
    """Register the backend for ``init_process_group("rehearsal")``, once per process."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            BACKEND, lambda store, rank, size, timeout: SilentGroup(rank, size), devices=["cpu", "meta"]
        )


def _description(group: Any) -> str:
    return getattr(group, "group_desc", "") or ""


def _tensors(message: Any) -> list[Tensor]:
    if isinstance(message, Tensor):
        return [message]
    return [tensor for item in message for tensor in _tensors(item)]


def _fill(output: Tensor, tensor: Tensor) -> None:
    """Fill ``output`` with copies of this rank's ``tensor``, as if the other ranks had the same."""
    if output.device.type != "cpu" or output.numel() == 0 or tensor.numel() == 0:
        return
    if output.shape == tensor.shape and output.dtype == tensor.dtype:
        output.data.copy_(tensor)
        return
    repeated = tensor.reshape(-1).repeat(-(-output.numel() // tensor.numel()))[: output.numel()]
    with torch.no_grad():
        output.copy_(repeated.reshape(output.shape))
