# SPDX-License-Identifier: Apache-2.0
"""Checks the memory of collectives in flight. On a CPU, only a wait keeps the storage of a running collective from
being freed.

On a GPU, a free is ordered after earlier work of the stream. A gloo thread has no streams, and would continue to write
to the freed memory. Collectives that torch's compiled operators start (DTensor's) aren't observed; they allocate their
own memory.
"""

import contextlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

_COLLECTIVES = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)
"""Methods of torch's process groups, in all versions."""


class Watch:
    """``problems``: a sentence with both places in the code for each storage that was freed or resized under a collective, and
    for each tensor that ends behind its storage. ``seen``: collectives begun; ``resized``: storages."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.seen = self.resized = 0
        self._begun: dict[int, tuple[Any, str, set[int], str]] = {}

    def begin(self, name: str, work: Any, tensors: list[Tensor]) -> None:
        self.seen += 1
        for tensor in tensors:
            end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
            if tensor.numel() and end > tensor.untyped_storage().nbytes():
                self.problems.append(f"{name} of a {tuple(tensor.shape)} that ends behind its storage:\n{_here()}")
        if work is not None:
            self._begun[id(work)] = (work, name, {tensor.untyped_storage()._cdata for tensor in tensors}, _here())

    def end(self, work: Any) -> None:
        self._begun.pop(id(work), None)

    def resize(self, storage: torch.UntypedStorage) -> None:
        self.resized += 1
        for _, name, storages, begun in self._begun.values():
            if storage._cdata in storages:
                self.problems.append(f"resized, and {name} wasn't waited for:\n{_here()}--- begun:\n{begun}")


@contextlib.contextmanager
def watched() -> Iterator[Watch]:
    """In this context, this process's collectives and resized storages are compared. A collective counts as in flight
    until its ``wait()`` is called, even if it has ended before, so the result doesn't depend on timing."""
    from torch._C._distributed_c10d import ProcessGroup, Work

    watch = Watch()

    def collective(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def begin(self: Any, *args: Any, **kwargs: Any) -> Any:
            work = original(self, *args, **kwargs)
            watch.begin(name, work, list(_tensors([*args, *kwargs.values()])))
            return work

        return begin

    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return waits(self, *args, **kwargs)
        finally:
            watch.end(self)

    def resizing(original: Callable[..., Any]) -> Callable[..., Any]:
        def resize(self: Any, *args: Any, **kwargs: Any) -> Any:
            watch.resize(self.untyped_storage() if isinstance(self, Tensor) else self)
            return original(self, *args, **kwargs)

        return resize

    waits = Work.wait
    with contextlib.ExitStack() as stack:
        for name in _COLLECTIVES:
            if hasattr(ProcessGroup, name):
                _replace(stack, ProcessGroup, name, collective(name, getattr(ProcessGroup, name)))
        _replace(stack, Work, "wait", wait)
        for owner, name in ((torch.UntypedStorage, "resize_"), (Tensor, "resize_"), (Tensor, "set_")):
            _replace(stack, owner, name, resizing(getattr(owner, name)))
        yield watch


def _replace(stack: contextlib.ExitStack, owner: Any, name: str, replacement: Any) -> None:
    if name in vars(owner):
        stack.callback(setattr, owner, name, vars(owner)[name])
    else:
        stack.callback(delattr, owner, name)
    setattr(owner, name, replacement)


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)


def _here() -> str:
    return "".join(traceback.format_stack(limit=12)[:-2])
