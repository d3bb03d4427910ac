# SPDX-License-Identifier: Apache-2.0
"""Operators of torch on pretend GPUs compute on the CPU.

Device memory is host memory, so a CUDA tensor can be seen as a CPU tensor of the same bytes. Each aten operator with a CUDA
kernel gets a replacement that runs the CPU kernel on such views, and puts new results into new CUDA tensors. It goes onto the
current stream first, so that CUDA's rules of capture hold for it. What is captured is computed at each launch of the graph.

It needs nothing of the project: a process loads it right after torch (`site/sitecustomize.py`).
"""

import ctypes
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

HOST_ONLY = {
    *(
        "empty.memory_format",
        "empty_strided",
        "as_strided",
        "view",
        "_reshape_alias",
        "unfold",
        "resize_",
        "view.dtype",
    ),
    *("set_", "set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor"),
    *(
        "set_.source_Tensor_storage_offset",
        "_local_scalar_dense",
        "record_stream",
        "is_pinned",
        "_pin_memory",
        "is_set_to",
    ),
    *("view_as_real", "view_as_complex", "lift", "lift_fresh", "alias", "detach", "_fused_sdp_choice", "equal", "item"),
    *("is_nonzero", "_async_error", "_assert_async", "_assert_async.msg", "_nested_tensor_from_mask"),
    *("_cudnn_init_dropout_state", "cudnn_is_acceptable"),
}
"""Operators whose CUDA kernel works on the host alone."""
SYNCHRONIZING = {
    *(
        "nonzero",
        "masked_select",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "bincount",
        "histc",
        "repeat_interleave",
    )
}
"""Operators that wait for the GPU, because the shape of their result depends on values."""
MIXING = {
    *(
        "index",
        "index_put_",
        "_index_put_impl_",
        "index_put",
        "_unsafe_index",
        "_unsafe_index_put",
        "set_",
        "_copy_from",
    ),
    *("_amp_update_scale_",),
}
"""Operators that take tensors of the CPU and of a GPU together."""
CPU = torch.device("cpu")
C = torch._C
below_autograd = C._AutoDispatchBelowAutograd

core = ctypes.CDLL("libpretend_core.so")
core.pretend_operator.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
_held: list[Any] = []  # what C holds a pointer to
_replayed: list[Callable[[], Any]] = []


def install() -> None:
    """Replace the CUDA kernels of torch's operators in this process."""
    if not torch.version.cuda:
        return
    _held.append(ctypes.CFUNCTYPE(None, ctypes.c_long)(_replay))
    core.pretend_set_callback(_held[-1])
    library = torch.library.Library("aten", "IMPL")
    _held.append(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that kernels are replaced
        for name in C._dispatch_get_all_op_names():
            short = name.removeprefix("aten::")
            if short != name and short not in HOST_ONLY and _has_kernels(name):
                base, _, overload = short.partition(".")
                try:
                    operator = getattr(getattr(torch.ops.aten, base), overload or "default")
                except AttributeError:  # one of TorchScript's, which Python can't call
                    continue
                library.impl(short, Replacement(operator, short), "CUDA")
        for short in ("convolution", "convolution_backward"):  # CUDA chooses among kernels of cuDNN's below these
            if not C._dispatch_has_kernel_for_dispatch_key(f"aten::{short}", "CUDA"):
                library.impl(short, Replacement(getattr(torch.ops.aten, short).default, short), "CUDA")
        for name, function in ON_CUDA_ONLY.items():
            if C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
                base, _, overload = name.partition(".")
                operator = getattr(getattr(torch.ops.aten, base), overload or "default")
                library.impl(name, Replacement(operator, name, function), "CUDA")
        for base, function in {
            "copy_": _copy,
            "equal": _equal,
            "_fused_sdp_choice": lambda *arguments, **keywords: (
                0
            ),  # flash, memory-efficient and cuDNN attention have no CPU kernel
        }.items():
            library.impl(base, function, "CUDA")
        for name in ("aten::empty.memory_format", "aten::empty_strided"):
            library.impl(name.removeprefix("aten::"), _zeroed(name), "CUDA", with_keyset=True)
    for backend in ("flash", "mem_efficient", "cudnn"):
        getattr(C, f"_set_sdp_use_{backend}")(False)


def _has_kernels(name: str) -> bool:
    has = C._dispatch_has_kernel_for_dispatch_key
    return has(name, "CUDA") and (has(name, "CPU") or has(name, "CompositeExplicitAutograd"))


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor of the same bytes."""
    if tensor.numel() == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=CPU)
    storage = tensor.untyped_storage()
    bytes_ = C._construct_storage_from_data_pointer(storage.data_ptr(), CPU, storage.nbytes())
    view = torch.empty(0, dtype=tensor.dtype, device=CPU)
    view.set_(bytes_, tensor.storage_offset(), tensor.size(), tensor.stride())
    if tensor.is_conj():
        view = view.conj()
    return torch._neg_view(view) if tensor.is_neg() else view  # pyright: ignore[reportPrivateImportUsage]


def on_gpu(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A new CUDA tensor with the values of one of the CPU, and its strides where it has no gaps."""
    if tensor.device.type != "cpu":
        return tensor
    if tensor.is_contiguous() or (
        0 not in tensor.stride() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    ):
        new = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    else:
        new = torch.empty(tensor.size(), dtype=tensor.dtype, device=device)
    if tensor.numel():
        on_cpu(new).copy_(tensor)
    return new


def _replay(index: int) -> None:
    with below_autograd(), torch.no_grad():
        _replayed[index]()


def keep(function: Callable[[], Any]) -> None:
    """Let ``function`` run at each launch of the graph that is being captured."""
    _replayed.append(function)
    core.pretend_keep(ctypes.c_long(len(_replayed) - 1))


def put_onto_stream(device: torch.device, name: str) -> None:
    error = core.pretend_operator(torch.cuda.current_stream(device).cuda_stream, name.encode())
    if error:
        raise torch.AcceleratorError(f"CUDA error {error} ({name})")


class Replacement:
    """The kernel of one operator: arguments as CPU tensors, the CPU kernel, results as CUDA tensors."""

    def __init__(self, operator: Any, name: str, compute: Callable[..., Any] | None = None) -> None:
        schema = operator._schema
        self.compute, self.name = compute or operator, name
        self.arguments = schema.arguments
        self.positions = {argument.name: index for index, argument in enumerate(self.arguments)}
        written = {
            alias: index
            for index, argument in enumerate(self.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
            for alias in argument.alias_info.before_set
        }
        self.returned = [_aliased(returned, written) for returned in schema.returns]
        """For each result the position of the argument that it is, or None for a new tensor."""
        self.base = name.split(".")[0]

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        with below_autograd():
            call = _Call(self, arguments, keywords)
            put_onto_stream(call.device, self.name)
            if self.base in SYNCHRONIZING:
                torch.cuda.current_stream(call.device).synchronize()
            captured = core.pretend_captured()
            if captured and None not in self.returned and all(original.numel() for original, _ in call.outputs):
                keep(call.compute)  # no new tensor whose shape is to be known: it is computed at the launch only
                return call.given()
            results = call.compute()
            if not self.returned:
                if captured:
                    keep(call.compute)
                return None
            new = call.packed(results)
            if captured:
                places = [_bytes_of(part) for part in new]
                keep(lambda: call.compute_into(places))
            return new[0] if len(self.returned) == 1 else tuple(new)


def _aliased(returned: Any, written: dict[str, int]) -> int | None:
    if returned.alias_info is None or not returned.alias_info.is_write:
        return None
    return next((written[alias] for alias in returned.alias_info.before_set if alias in written), None)


class _Call:
    """One call of an operator on CUDA tensors, as one on CPU tensors."""

    def __init__(self, kernel: Replacement, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self.kernel, self.arguments, self.keywords = kernel, arguments, keywords
        self._device: torch.device | None = None
        self.outputs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._on_cpu: list[torch.Tensor] = []
        self._on_gpu = False
        expected = kernel.arguments
        self.converted = [
            self._convert(self._number(value, index), expected[index].is_out) for index, value in enumerate(arguments)
        ]
        self.converted_keywords = {
            name: self._convert(value, name in kernel.positions and expected[kernel.positions[name]].is_out)
            for name, value in keywords.items()
        }
        self.device = self._device or torch.device("cuda", torch.cuda.current_device())
        if self._on_cpu and self._on_gpu and kernel.base not in MIXING:
            self._refuse(self._on_cpu[0])
        self._adapt()

    def _number(self, value: Any, index: int) -> Any:
        """A number where the operator takes a tensor: of the dtype that CUDA would give it."""
        if not isinstance(value, (int, float, complex)) or str(self.kernel.arguments[index].type) != "Tensor":
            return value
        first = next((other.dtype for other in self.arguments if isinstance(other, torch.Tensor)), torch.float32)
        if isinstance(value, bool):
            dtype = torch.bool
        elif isinstance(value, int):
            dtype = first if first != torch.bool else torch.int64
        elif isinstance(value, float):
            dtype = first if first.is_floating_point else torch.get_default_dtype()
        else:
            dtype = None
        return torch.scalar_tensor(value, dtype=dtype, device=CPU)

    def _convert(self, value: Any, output: bool) -> Any:
        if isinstance(value, torch.Tensor):
            if value.device.type == "cpu" and value.dim():
                self._on_cpu.append(value)
            if value.device.type != "cuda":
                return value
            self._on_gpu = True
            self._device = self._device or value.device
            if value.device != self._device:
                self._refuse(value)
            if output:
                self.outputs.append(
                    (value, on_cpu(value) if value.numel() else torch.empty(0, dtype=value.dtype, device=CPU))
                )
                return self.outputs[-1][1]
            return on_cpu(value)
        if isinstance(value, (list, tuple)) and any(isinstance(part, torch.Tensor) for part in value):
            return [self._convert(part, output) for part in value]
        if isinstance(value, torch.device) and value.type == "cuda":
            index = torch.cuda.current_device() if value.index is None else value.index
            self._device = self._device or torch.device("cuda", index)
            return CPU
        return value

    def _refuse(self, tensor: torch.Tensor) -> None:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {self._device} and {tensor.device}! "
            f"(pretend GPU, {self.kernel.name})"
        )

    def _adapt(self) -> None:
        """What CPU kernels take otherwise: generators, pinned memory, and a softmax that changes the dtype."""
        if "pin_memory" in self.converted_keywords:
            self.converted_keywords["pin_memory"] = None
        position = self.kernel.positions.get("generator")
        if position is not None and position < len(self.converted):
            self.converted[position] = _generator(self.converted[position], self.device)
        elif position is not None:
            self.converted_keywords["generator"] = _generator(self.converted_keywords.get("generator"), self.device)
        position = self.kernel.positions.get("half_to_float")
        if position is not None and position < len(self.converted) and self.converted[position]:
            self.converted[position] = False
            self.converted[0] = self.converted[0].float()

    def compute(self) -> Any:
        results = self.kernel.compute(*self.converted, **self.converted_keywords)
        for original, computed in self.outputs:
            if original.shape != computed.shape:
                original.resize_(computed.shape)
            if original.numel() and computed.data_ptr() != original.data_ptr():
                on_cpu(original).copy_(computed)
        return results

    def packed(self, results: Any) -> list[Any]:
        """The results as the caller gets them."""
        parts = [results] if len(self.kernel.returned) == 1 else results
        return [
            self._pack(part) if position is None else self._argument(position)
            for part, position in zip(parts, self.kernel.returned, strict=True)
        ]

    def _pack(self, result: Any) -> Any:
        if isinstance(result, torch.Tensor):
            return on_gpu(result, self.device)
        return [self._pack(part) for part in result] if isinstance(result, (list, tuple)) else result

    def given(self) -> Any:
        """The results where all are arguments."""
        given = [self._argument(position) for position in self.kernel.returned if position is not None]
        return None if not given else given[0] if len(given) == 1 else tuple(given)

    def _argument(self, position: int) -> Any:
        if position < len(self.arguments):
            return self.arguments[position]
        return self.keywords[self.kernel.arguments[position].name]

    def compute_into(self, places: list[Any]) -> None:
        """Compute again, into the memory of the first time."""
        results = self.compute()
        parts = [results] if len(self.kernel.returned) == 1 else results
        for part, target, position in zip(parts, places, self.kernel.returned, strict=True):
            if position is None:
                for value, place in _pairs(part, target):
                    place.copy_(value)


def _bytes_of(value: Any) -> Any:
    """Views of the bytes of tensors, which stay where they are: a pipeline's stage gives other memory to tensors that it has
    sent (``tensor.data = ...``), and a launch writes where the capture wrote."""
    if isinstance(value, torch.Tensor):
        return on_cpu(value) if value.device.type == "cuda" else value
    return [_bytes_of(part) for part in value] if isinstance(value, (list, tuple)) else value


def _pairs(part: Any, target: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    together = zip(part, target, strict=True) if isinstance(target, (list, tuple)) else [(part, target)]
    return ((value, tensor) for value, tensor in together if isinstance(tensor, torch.Tensor) and tensor.numel())


def _generator(generator: torch.Generator | None, device: torch.device) -> torch.Generator:
    """A CPU generator whose numbers follow from the state of a GPU's, which moves on as for a kernel."""
    generator = generator or torch.cuda.default_generators[device.index or 0]
    if generator.device.type != "cuda":
        return generator
    offset = generator.get_offset()
    generator.set_offset(offset + 4)
    return torch.Generator().manual_seed((generator.initial_seed() * 1_000_003 + offset) % (1 << 62))


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    with below_autograd():
        gpu, other = (target, source) if target.device.type == "cuda" else (source, target)
        stream = torch.cuda.current_stream(gpu.device)
        if other.device.type == "cpu" and not other.is_pinned() and torch.cuda.is_current_stream_capturing():
            stream.synchronize()  # CUDA's error: pageable memory can't be captured
        put_onto_stream(gpu.device, "copy_")
        if target.device.type != source.device.type and not non_blocking:
            stream.synchronize()
        to, values = (on_cpu(tensor) if tensor.device.type == "cuda" else tensor for tensor in (target, source))
        if core.pretend_captured():
            keep(lambda: to.copy_(values))
        else:
            to.copy_(values)
        return target


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    with below_autograd():
        torch.cuda.current_stream(one.device).synchronize()
        return torch.equal(on_cpu(one), on_cpu(other))


def _product_in_another_dtype(name: str) -> Callable[..., torch.Tensor]:
    def product(*arguments: Any, **keywords: Any) -> torch.Tensor:
        *factors, dtype = arguments
        return getattr(torch, name)(*(factor.to(dtype) for factor in factors), **keywords)

    return product


def _rms_norm(
    x: torch.Tensor, shape: list[int], weight: torch.Tensor | None, eps: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    values = x if x.dtype == torch.float64 else x.float()
    mean = values.pow(2).mean(tuple(range(-len(shape), 0)), keepdim=True)
    inverse = torch.rsqrt(mean + (torch.finfo(x.dtype).eps if eps is None else eps))
    y = values * inverse if weight is None else values * inverse * weight.to(values.dtype)
    return y.to(x.dtype), inverse


def _rms_norm_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    shape: list[int],
    inverse: torch.Tensor,
    weight: torch.Tensor | None,
    mask: list[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    dy, r = gradient.float(), inverse.float()
    normed = x.float() * r
    by_weight = dy if weight is None else dy * weight.float()
    mean = (by_weight * normed).mean(tuple(range(-len(shape), 0)), keepdim=True)
    dx = (r * (by_weight - normed * mean)).to(x.dtype) if mask[0] else None
    dw = (dy * normed).reshape(-1, *shape).sum(0).to(weight.dtype) if weight is not None and mask[1] else None
    return dx, dw


ON_CUDA_ONLY: dict[str, Callable[..., Any]] = {
    "_fused_rms_norm": _rms_norm,
    "_fused_rms_norm_backward": _rms_norm_backward,
    # Matrix products whose result has another dtype than the factors.
    **{f"{name}.dtype": _product_in_another_dtype(name) for name in ("mm", "bmm", "addmm", "baddbmm")},
}
"""Operators without a CPU kernel, computed by others."""


def _zeroed(name: str) -> Callable[..., torch.Tensor]:
    """New memory is zero, so that what a kernel without effect would have written isn't left over from before."""
    kernel = torch.library.get_kernel(name, "CUDA")

    def empty(keys: Any, *arguments: Any, **keywords: Any) -> torch.Tensor:
        tensor = kernel.call_boxed(keys, *arguments, **keywords)
        storage = tensor.untyped_storage()
        if storage.nbytes():
            ctypes.memset(storage.data_ptr(), 0, storage.nbytes())
        return tensor

    return empty
