# SPDX-License-Identifier: Apache-2.0
"""Tracks every tensor storage that a step allocates and frees, its owner, and the arithmetic on it.

At any moment a storage belongs to one of: model state (declared with `own`), tensors that autograd saved for the
backward, messages between ranks, or work in progress. The tracker keeps the sums, and a copy of them at the highest
total. It works on meta tensors and on real tensors, so that a rehearsal can be compared with a real run.
"""

import functools
import operator
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

STATE, SAVED, MESSAGES, WORK = "state", "saved", "messages", "work"
Sums = dict[tuple[str, str], int]
"""(holder, part of the model) → bytes."""


class _Storage:
    __slots__ = ("bytes", "gone", "holder", "part", "saves")

    def __init__(self, size: int, part: str):
        self.bytes = size
        self.part = part
        self.holder = WORK
        self.saves = 0
        self.gone: Any = None


class Tracker(TorchDispatchMode):
    """Use as a context manager around a step.

    `parts` names modules by class, and `name` names single modules. Allocations inside such a module, at any depth, are
    counted under its name. The innermost named module wins.
    """

    def __init__(self, parts: Optional[Callable[[nn.Module], Optional[str]]] = None) -> None:
        super().__init__()
        self._parts = parts or (lambda module: None)
        self._names: dict[type, Optional[str]] = {}
        self._named: dict[int, str] = {}
        self._stack: list[str] = ["other"]
        self._alive: dict[int, _Storage] = {}
        self._contexts: list[Any] = []
        self.sums: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.allocated = 0
        """The bytes of all recorded storages that are alive."""
        self.peak = 0
        self.at_peak: Sums = {}
        self.saved = 0
        """The bytes that autograd keeps for the backward, without model state such as parameters."""
        self.saved_peak = 0
        self.phase = "build"
        """The phase of the step, set by its runner."""
        self.flops: defaultdict[tuple[str, str], int] = defaultdict(int)
        """(kind of kernel, phase) → floating-point operations. A multiply-add counts as two."""

    # ---------------------------------------------------------------------------------------------- what is alive

    def own(self, tensors: Iterable[Tensor]) -> int:
        """Declare ``tensors`` as model state, which never counts as saved. Returns the bytes of the storages that were not
        declared before."""
        total = 0
        for tensor in tensors:
            storage = self._record(tensor)
            if storage.holder != STATE:
                self._move(storage, STATE)
                total += storage.bytes
        return total

    def name(self, module: nn.Module, part: str) -> None:
        """Count the allocations of this module under ``part``, independently of its class."""
        self._named[id(module)] = part

    def start_peak(self) -> None:
        """Reset the peaks to the current totals."""
        self.peak, self.at_peak = self.allocated, dict(self.sums)
        self.saved_peak = self.saved

    def message(self, tensors: Iterable[Tensor], part: Optional[str] = None) -> None:
        """Declare ``tensors`` as buffers of a collective. They count as such until autograd saves them. ``part`` replaces the
        part of the model that they are counted under."""
        for tensor in tensors:
            storage = self._record(tensor)
            if storage.holder == WORK:
                self._move(storage, MESSAGES, part)

    def _record(self, tensor: Tensor) -> _Storage:
        untyped = tensor.untyped_storage()
        key = untyped._cdata
        storage = self._alive.get(key)
        if storage is None:
            storage = self._alive[key] = _Storage(untyped.nbytes(), self._stack[-1])
            storage.gone = weakref.ref(untyped, lambda _, key=key: self._freed(key))
            self.sums[WORK, storage.part] += storage.bytes
            self.allocated += storage.bytes
            self._note_peaks()
        return storage

    def _freed(self, key: int) -> None:
        storage = self._alive.pop(key, None)
        if storage is not None:
            self.sums[storage.holder, storage.part] -= storage.bytes
            self.allocated -= storage.bytes

    def _move(self, storage: _Storage, holder: str, part: Optional[str] = None) -> None:
        self.sums[storage.holder, storage.part] -= storage.bytes
        storage.holder, storage.part = holder, part or storage.part
        self.sums[storage.holder, storage.part] += storage.bytes

    def _resized(self, untyped: Any) -> None:
        storage = self._alive.get(untyped._cdata)
        if storage is None:
            return
        change = untyped.nbytes() - storage.bytes
        storage.bytes += change
        self.sums[storage.holder, storage.part] += change
        self.allocated += change
        if storage.saves:
            self.saved += change
        self._note_peaks()

    def _note_peaks(self) -> None:
        if self.allocated > self.peak:
            self.peak, self.at_peak = self.allocated, dict(self.sums)
        self.saved_peak = max(self.saved_peak, self.saved)

    # ---------------------------------------------------------------------------------------------- what autograd saves

    def _pack(self, tensor: Tensor) -> Any:
        storage = self._record(tensor)
        if storage.holder == STATE:
            return tensor
        if not storage.saves:
            self._move(storage, SAVED)
            self.saved += storage.bytes
            self._note_peaks()
        storage.saves += 1
        return _Held(tensor, storage, self)

    def _let_go(self, storage: _Storage) -> None:
        storage.saves -= 1
        if not storage.saves:
            self.saved -= storage.bytes
            if storage.holder == SAVED:
                self._move(storage, WORK)

    # ---------------------------------------------------------------------------------------------- what is computed

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # a rehearsal compiles nothing, and skipping takes a fifth of the time

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = _compute(func, args, kwargs or {})
        if isinstance(out, Tensor):
            self._record(out)
        elif isinstance(out, (tuple, list)):
            for item in out:
                if isinstance(item, Tensor):
                    self._record(item)
        count = _FLOPS.get(func)
        if count is not None:
            kind, formula = count
            self.flops[kind, self.phase] += formula(args, out)
        return out

    # ---------------------------------------------------------------------------------------------- being a context

    def __enter__(self) -> "Tracker":
        global _current
        _current = self
        modules = nn.modules.module
        self._handles = [
            modules.register_module_forward_pre_hook(self._enter_module),
            modules.register_module_forward_hook(self._leave_module, always_call=True),
        ]
        hooks = saved_tensors_hooks(self._pack, lambda held: held.tensor if isinstance(held, _Held) else held)
        hooks.__enter__()
        self._contexts.append(hooks)
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = self._resizing(self._resize)
        return super().__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        global _current
        _current = None
        super().__exit__(*exc_info)
        torch.UntypedStorage.resize_ = self._resize
        self._contexts.pop().__exit__(*exc_info)
        for handle in self._handles:
            handle.remove()

    def _resizing(self, original: Any) -> Any:
        def resize_(untyped: Any, size: int) -> Any:
            result = original(untyped, size)
            self._resized(untyped)
            return result

        return resize_

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        kind = type(module)
        if kind not in self._names:
            self._names[kind] = self._parts(module)
        self._stack.append(self._named.get(id(module)) or self._names[kind] or self._stack[-1])

    def _leave_module(self, module: nn.Module, args: Any, out: Any) -> None:
        self._stack.pop()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A context in which allocations count under ``name``."""
        self._stack.append(name)
        try:
            yield
        finally:
            self._stack.pop()


_current: Optional[Tracker] = None


def add_flops(kind: str, count: int) -> None:
    """Add arithmetic that the tracker can't observe to the tracker of this process, if there is one."""
    if _current is not None:
        _current.flops[kind, _current.phase] += count


def share(discarded: Tensor, recomputed: Tensor) -> None:
    """Restore a discarded output that from now on shares the storage of the recomputed one, which alone is counted."""
    resize: Any = torch.UntypedStorage.resize_ if _current is None else _current._resize
    resize(discarded.untyped_storage(), recomputed.untyped_storage().nbytes())


class _Held:
    """A saved tensor. It notifies the tracker when the autograd graph drops it."""

    __slots__ = ("storage", "tensor", "tracker")

    def __init__(self, tensor: Tensor, storage: _Storage, tracker: Tracker):
        self.tensor, self.storage, self.tracker = tensor, storage, tracker

    def __del__(self) -> None:
        self.tracker._let_go(self.storage)


def _compute(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of ``func``. torch computes the shapes of meta tensors in Python, which takes milliseconds, so it does so
    once for all arguments of one form."""
    results = _results_of(func)
    if results is None:
        return func(*args, **kwargs)
    form = torch.get_default_dtype(), _form(args), _form(tuple(kwargs.items()))
    result = results.get(form)
    if result is not None:
        return result(args)
    out = func(*args, **kwargs)
    if form not in results:
        results[form] = _repeated(args, kwargs, out) if _form(args) == form[1] else None
    return out


@functools.cache
def _results_of(func: Any) -> Optional[dict[Any, Optional[Callable[[Any], Any]]]]:
    """By the form of its arguments: a function from the positional arguments of ``func`` to its result, or None where torch
    must compute the result. None: torch always must, because ``func`` returns a view, exchanges an argument's storage, or
    isn't torch's own."""
    views = [one for one in func._schema.arguments if one.alias_info is not None and not one.alias_info.is_write]
    return None if views or func.namespace != "aten" or torch.Tag.inplace_view in func.tags else {}


def _form(value: Any) -> Any:
    """What the form of a result can depend on in an argument."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.is_meta
    if isinstance(value, (list, tuple)):
        return tuple([_form(item) for item in value])
    return type(value), value  # 1, 1.0 and True are equal


def _repeated(args: Any, kwargs: Any, out: Any) -> Optional[Callable[[Any], Any]]:
    """A function that returns a result like ``out`` for other arguments of the same form. None: values matter, or ``out``
    is neither an argument nor new."""
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    outs = [*out] if isinstance(out, (list, tuple)) else [] if out is None else [out]
    if not all(isinstance(one, Tensor) and one.is_meta for one in (*inputs, *outs)):
        return None
    for index, argument in enumerate(args):
        if out is argument:
            return operator.itemgetter(index)
    made = [
        functools.partial(torch.empty_strided, one.shape, one.stride(), dtype=one.dtype, device="meta") for one in outs
    ]
    new = {one.untyped_storage()._cdata for one in outs} - {one.untyped_storage()._cdata for one in inputs}
    sizes = [one.untyped_storage().nbytes() for one in outs]
    if len(new) < len(outs) or sizes != [make().untyped_storage().nbytes() for make in made]:
        return None
    if out is None or isinstance(out, Tensor):
        return lambda args: made[0]() if made else None
    kind = type(out)  # a closure over `out` would keep its tensors
    return lambda args: kind([make() for make in made])


def _product(a: Tensor, out: Tensor) -> int:
    """The FLOPs of a matrix product with the left operand ``a`` and the result ``out``."""
    return 2 * out.numel() * a.shape[-1]


_aten = torch.ops.aten
_FLOPS: dict[Any, tuple[str, Callable[[Any, Any], int]]] = {
    _aten.mm.default: ("gemm", lambda args, out: _product(args[0], out)),
    _aten.addmm.default: ("gemm", lambda args, out: _product(args[1], out)),
    _aten.bmm.default: ("batched_gemm", lambda args, out: _product(args[0], out)),
    _aten.baddbmm.default: ("batched_gemm", lambda args, out: _product(args[1], out)),
}
if hasattr(_aten, "_grouped_mm"):
    # [tokens, in] x [groups, in, out] → [tokens, out]. The gradient of the weights is [in, tokens] x [tokens, out] →
    # [groups, in, out], in which every token belongs to one group.
    _FLOPS[_aten._grouped_mm.default] = (
        "grouped_gemm",
        lambda args, out: _product(args[0], out) if out.dim() == 2 else 2 * args[0].numel() * args[1].shape[-1],
    )
