# SPDX-License-Identifier: Apache-2.0
"""Records every collective and message of this process with its group, from its start to its end.

torch's profiler records the process group of NCCL kernels but not of gloo's work, and has no span for a message in
progress. All calls of torch.distributed go through the methods of `ProcessGroup`, which are wrapped while the recorder
is active.

A collective ends when its future is done, on the thread that ran it. gloo's messages have no future. They end when a
caller has waited for them.
"""

import contextlib
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from torch._C._distributed_c10d import ProcessGroup

from nemo2.report.trace.events import kernel_kind

# torch 2.13 has renamed some methods and keeps their old names.
_GATHERS = ("allgather_into_tensor_coalesced", "all_gather_single", "all_gather_single_coalesced")
_SCATTERS = ("reduce_scatter_tensor_coalesced", "reduce_scatter_single", "reduce_scatter_single_coalesced")
_NAMES = {
    "all_reduce": ("allreduce", "allreduce_coalesced"),
    "all_gather": ("allgather", "allgather_coalesced", "_allgather_base", *_GATHERS),
    "reduce_scatter": ("reduce_scatter", "_reduce_scatter_base", *_SCATTERS),
    "all_to_all": ("alltoall", "alltoall_base", "all_to_all_single"),
    "broadcast": ("broadcast",),
    "send": ("send",),
    "recv": ("recv",),
}
_METHODS = {method: name for name, methods in _NAMES.items() for method in methods}


@dataclass(eq=False)
class Communication:
    """A collective or message. Times are in nanoseconds since the epoch, None while it is in progress."""

    name: str
    """``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``broadcast``, ``send`` or ``recv``."""
    group: str
    """The group's description."""
    size_bytes: int
    issued: int
    returned: int = 0
    """The time at which the call returned. The caller is held from ``issued`` until then."""
    waits: list[tuple[int, int]] = field(default_factory=list)
    """The intervals in which a caller waited for the end."""
    done: Optional[int] = None

    @property
    def kind(self) -> str:
        return kernel_kind(self.name, self.group)


class CommunicationRecorder:
    """A context that records this process's communication in `communications`, in the order in which it starts.

    The wrappers cost some microseconds per call and change nothing else. Only one recorder can be active at a time.

    Raises:
        RuntimeError: another recorder is active.
    """

    _active: Optional["CommunicationRecorder"] = None

    def __init__(self) -> None:
        self.communications: list[Communication] = []
        self._originals: dict[str, Any] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> "CommunicationRecorder":
        if CommunicationRecorder._active is not None:
            raise RuntimeError("Another CommunicationRecorder is active. Leave its context first.")
        CommunicationRecorder._active = self
        for name in _METHODS:
            # From the class's dictionary: the result of `getattr` would not bind to instances after it is restored.
            original = vars(ProcessGroup).get(name)
            if original is not None:
                self._originals[name] = original
                setattr(ProcessGroup, name, self._wrapped(name, getattr(ProcessGroup, name)))
        return self

    def __exit__(self, *exc_info: object) -> None:
        for name, original in self._originals.items():
            setattr(ProcessGroup, name, original)
        self._originals.clear()
        CommunicationRecorder._active = None

    def _wrapped(self, name: str, original: Any) -> Any:
        def call(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            entry = Communication(
                name=_METHODS[name],
                group=getattr(group, "group_desc", "") or "",
                # A rank's input or output, whichever is larger.
                size_bytes=max(map(_size, args), default=0),
                issued=time.time_ns(),
            )
            with self._lock:
                self.communications.append(entry)
            work = original(group, *args, **kwargs)
            entry.returned = time.time_ns()
            if work is None:
                entry.done = entry.returned
                return work
            return _Watched(work, entry)

        return call


class _Watched:
    """A `Work` that records the time of its end. All else is delegated to the work."""

    def __init__(self, work: Any, entry: Communication) -> None:
        self._work, self._entry = work, entry
        # Messages over gloo have no future.
        with contextlib.suppress(RuntimeError):
            work.get_future().add_done_callback(self._done)

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        begin = time.time_ns()
        result = self._work.wait(*args, **kwargs)
        self._entry.waits.append((begin, time.time_ns()))
        self._done()
        return result

    def is_completed(self) -> bool:
        completed = self._work.is_completed()
        if completed:
            self._done()
        return completed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def _done(self, future: Any = None) -> None:
        del future
        if self._entry.done is None:
            self._entry.done = time.time_ns()


def _size(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(_size, value)) if isinstance(value, list | tuple) else 0
