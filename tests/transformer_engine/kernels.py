# SPDX-License-Identifier: Apache-2.0
"""Replaces Transformer Engine's kernels on a machine without a GPU, so that its own Python code runs whole steps.

Nothing is computed: a product, a norm or a cast returns a tensor of the right shape and kind. All code around the
kernels runs: it creates a recipe's quantizers, asserts shapes and states, and saves tensors for the backward pass.
"""

import functools
import importlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch

EXTENSION = "transformer_engine_torch"
CUDA = "13.0"


_MAKERS = (
    "arange",
    "empty",
    "empty_like",
    "eye",
    "full",
    "ones",
    "ones_like",
    "rand",
    "randn",
    "tensor",
    "zeros",
    "zeros_like",
)


def _on_cpu(function: Any) -> Any:
    """The function, making on the CPU what it is asked to make on the GPU. (A mode of torch would not reach into a backward.)"""

    # A whole number is a device to the one that moves, and a size to those that make.
    places = (str, torch.device, int) if function.__name__ == "to" else (str, torch.device)

    @functools.wraps(function)
    def made(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _cpu(kwargs["device"])
        return function(*(_cpu(one) if isinstance(one, places) else one for one in args), **kwargs)

    return made


def _cpu(device: Any) -> Any:
    if isinstance(device, bool):  # `to(dtype, non_blocking, copy)`
        return device
    return "cpu" if device == 0 or "cuda" in str(device) else device


def as_if_on_a_gpu() -> None:
    """Answer for the machine: streams, ranges and tensors "on the GPU" are there, and kernels answer by shape. Once per process,
    behind `tests.transformer_engine.sources.import_sources`."""
    extension: Any = sys.modules[EXTENSION]
    extension.generic_gemm, extension.te_general_grouped_gemm = _product, _products
    extension.quantize, extension.split_quantize = _quantized, _split
    extension.create_empty_quantized_tensor = _empty
    extension.layernorm_fwd = extension.rmsnorm_fwd = _normed
    extension.rmsnorm_bwd_add = lambda dz, x, *rest: (torch.zeros_like(x), torch.zeros(x.shape[-1]))
    extension.rmsnorm_bwd = lambda dz, x, *rest: (torch.zeros_like(x), torch.zeros(x.shape[-1]))
    extension.layernorm_bwd = lambda dz, x, *rest: (*[torch.zeros_like(x)], *[torch.zeros(x.shape[-1])] * 2)
    extension.bgrad_quantize = lambda grad, quantizer: (torch.zeros(grad.shape[-1]), _quantized(grad, quantizer))
    for kind in ("scaled", "scaled_masked", "scaled_upper_triang_masked", "scaled_aligned_causal_masked"):
        setattr(extension, f"{kind}_softmax_forward", lambda scores, *rest: torch.zeros_like(scores))
        setattr(extension, f"{kind}_softmax_backward", lambda grad, *rest: torch.zeros_like(grad))
    extension.get_cublasLt_version = lambda: 130000
    extension.get_cudart_version = lambda: 13000
    nvtx: Any = importlib.import_module("torch.cuda.nvtx")
    nvtx.range_push = nvtx.range_pop = lambda *args, **kwargs: None
    cuda: Any = torch.cuda
    cuda.is_current_stream_capturing = lambda: False
    cuda.Stream = cuda.Event = cuda.current_stream = cuda.stream = MagicMock()
    cuda.device = lambda *args: nullcontext()
    cuda.is_available, cuda.current_device, cuda.synchronize = lambda: True, lambda: 0, lambda *args: None
    torch.Tensor.is_cuda = property(lambda self: True)  # pyright: ignore[reportAttributeAccessIssue]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    made = torch.Tensor._make_wrapper_subclass
    torch.Tensor._make_wrapper_subclass = lambda *args, device=None, **kwargs: made(
        *args, device=_cpu(device), **kwargs
    )
    torch.version.cuda = CUDA
    _imported(extension)
    for owner, names in ((torch, _MAKERS), (torch.Tensor, ("to", "new_empty", "new_zeros"))):
        for name in names:
            setattr(owner, name, _on_cpu(getattr(owner, name)))


def _imported(extension: Any) -> None:
    """Give the answers to the modules too that took the names from the extension when they were imported, or with a star."""
    calls: Any = importlib.import_module("transformer_engine.pytorch.cpp_extensions")
    answers = {name: one for name, one in vars(extension).items() if inspect.isfunction(one)}
    for name in [one for one in answers if one.startswith(("layernorm_", "rmsnorm_"))]:
        setattr(calls, name, answers[name])
    for module in [one for name, one in sys.modules.items() if name.startswith("transformer_engine.pytorch")]:
        for name in answers.keys() & vars(module).keys():
            if isinstance(vars(module)[name], MagicMock):
                setattr(module, name, answers[name])
    distributed: Any = importlib.import_module("transformer_engine.pytorch.distributed")
    distributed._get_cuda_rng_state = lambda *args, **kwargs: torch.zeros(1)
    distributed._set_cuda_rng_state = lambda *args, **kwargs: None


@contextmanager
def gpu(major: int, minor: int, cuda: str = CUDA) -> Iterator[None]:
    """Inside, the machine's GPU is of this compute capability, with torch built for this CUDA; of others nothing is kept."""
    module: Any = torch.cuda
    kept = module.get_device_properties, getattr(module, "get_device_capability", None), torch.version.cuda
    module.get_device_properties = lambda *args: SimpleNamespace(major=major, minor=minor, multi_processor_count=132)
    module.get_device_capability = lambda *args: (major, minor)
    torch.version.cuda = cuda
    _forget()
    try:
        yield
    finally:
        module.get_device_properties, module.get_device_capability, torch.version.cuda = kept
        _forget()


def _forget() -> None:
    """Clear what versions cache about the machine, in two places."""
    modules = [one for name, one in sys.modules.items() if name.startswith("transformer_engine.pytorch")]
    for module in modules:
        for name, value in list(vars(module).items()):
            if name.startswith("_") and name.endswith("_SUPPORT"):
                setattr(module, name, None)
            elif type(value).__name__ == "_lru_cache_wrapper":
                value.cache_clear()
            elif name == "FP8GlobalStateManager":
                for state in (value, getattr(value, "quantization_state", None)):
                    for field in [
                        one for one in dir(state) if one.endswith("_available") and not one.startswith("is_")
                    ]:
                        setattr(state, field, None)


# ------------------------------------------------------------------------------------------------------------ kernels


def _sizes(tensor: Any) -> tuple[int, ...]:
    turned = getattr(tensor, "_transpose", None)
    if (
        turned is not None and tensor._data is None
    ):  # the last dimension comes first, which 2.17 takes for two dimensions
        return (*turned.shape[1:], turned.shape[0])
    return tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else tuple(tensor.size())


def _product(a: Any, a_turned: bool, b: Any, b_turned: bool, out: Any = None, *rest: Any, **options: Any) -> Any:
    columns = _sizes(a)[0] if a_turned else _sizes(a)[-1]
    rows = (_sizes(b)[-1],) if b_turned else _sizes(b)[:-1]
    if out is None:
        out = torch.zeros(*rows, columns, dtype=torch.bfloat16)
    return out, None, None, None


def _products(*args: Any, **options: Any) -> Any:
    return []


def _quantized(tensor: Any, quantizer: Any, out: Any = None, noop: Any = None) -> Any:
    if out is not None:
        return out
    return quantizer.make_empty(tensor.shape, dtype=tensor.dtype, device=torch.device("cpu"))


def _split(tensor: Any, sizes: Any, quantizers: Any, **options: Any) -> Any:
    return [_quantized(part, one) for part, one in zip(torch.split(tensor, sizes), quantizers, strict=True)]


def _normed(x: Any, *rest: Any, **options: Any) -> Any:
    quantizer = next((one for one in rest if hasattr(one, "make_empty")), None)
    out = torch.zeros_like(x) if quantizer is None else _quantized(x, quantizer)
    return out, torch.zeros(x.shape[0]), torch.zeros(x.shape[0])


_KINDS = {
    "Float8Quantizer": "Float8",
    "Float8CurrentScalingQuantizer": "Float8",
    "MXFP8Quantizer": "MXFP8",
    "Float8BlockQuantizer": "Float8BlockwiseQ",
    "NVFP4Quantizer": "NVFP4",
}


def _empty(quantizer: Any, shape: Any, dtype: Any, device: Any, pin: bool = False) -> Any:
    """A quantised tensor without contents, as the extension makes it since 2.17."""
    kind, shape = _KINDS[type(quantizer).__name__], tuple(shape)
    storage = bool(getattr(quantizer, "internal", False))
    cls = somewhere(f"{kind}TensorStorage" if storage else f"{kind}Tensor")
    given: dict[str, Any] = {"quantizer": quantizer, "fp4_dtype" if kind == "NVFP4" else "fp8_dtype": quantizer.dtype}
    given |= {"fake_dtype": dtype} if storage else {"shape": shape, "dtype": dtype}
    ways = {"rowwise": quantizer.rowwise_usage, "columnwise": quantizer.columnwise_usage}
    if kind == "Float8":
        data = torch.zeros(shape, dtype=torch.uint8) if ways["rowwise"] else None
        turned = torch.zeros((shape[-1], *shape[:-1]), dtype=torch.uint8) if ways["columnwise"] else None
        return cls(data=data, fp8_scale_inv=torch.ones(1), data_transpose=turned, **given)
    for way, used in ways.items():
        scales = quantizer.get_scale_shape(shape, way == "columnwise") if used else None
        turn = way == "columnwise" and hasattr(quantizer, "get_columnwise_shape")
        sizes = tuple(quantizer.get_columnwise_shape(shape)) if turn else shape
        packed = (*sizes[:-1], sizes[-1] // 2) if kind == "NVFP4" else sizes  # two values a byte
        given[f"{way}_data"] = torch.zeros(packed, dtype=torch.uint8) if used else None
        given[f"{way}_scale_inv"] = torch.zeros(scales, dtype=torch.uint8) if scales is not None else None
        if kind == "NVFP4":
            given[f"amax_{way}"] = torch.zeros(1)
    given |= {"is_2D_scaled": quantizer.block_scaling_dim == 2} if kind == "Float8BlockwiseQ" else {}
    given |= {"with_gemm_swizzled_scales": False} if kind in ("MXFP8", "NVFP4") else {}
    return cls(**given)


def somewhere(name: str) -> Any:
    """A class of Transformer Engine's tensors, from whichever module the version has it in. None: there is none."""
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("transformer_engine.pytorch.tensor") and hasattr(module, name):
            return getattr(module, name)
    return None
