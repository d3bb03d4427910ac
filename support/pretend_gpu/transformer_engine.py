# SPDX-License-Identifier: Apache-2.0
"""Functions of Transformer Engine's extension on pretend GPUs have values.

The extension's own host code runs first, with its assertions and allocations; its kernels have no effect. Then the results are
computed on the CPU, into the tensors that it returned. What is missing stays zero: kernels of userbuffers, and the products
that read what they bring.

Like `operators.py` it needs nothing of the project. ``x2`` are the rows of ``x``: two dimensions, the last as it was.
"""

import sys
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

operators: Any = sys.modules["pretend_gpu_operators"]
VALUES: dict[str, Callable[..., None]] = {}
"""By name of a function: what fills its results. It is called with the results, then with the function's arguments."""
TRITON = tuple(f"transformer_engine.pytorch.triton.{name}" for name in ("permutation", "cross_entropy"))
"""Modules that launch kernels of Triton."""
E5M2 = 8
"""`transformer_engine_torch.DType.kFloat8E5M2`, where an enumeration isn't told apart by name."""
MASKED = -10000.0
"""What Transformer Engine's softmax with a mask writes in place of a score."""


def install() -> None:
    """Replace the functions in the extension and in all modules that imported them."""
    extension: Any = sys.modules["transformer_engine_torch"]
    for module in map(sys.modules.get, TRITON):
        for name, value in list(vars(module).items()) if module is not None else ():
            if name.endswith("_kernel"):
                setattr(module, name, _Kernel(VALUES.get(name)))
            elif name in VALUES:
                setattr(module, name, _filled(value, VALUES[name]))
    replaced = {}
    for name, fill in VALUES.items():
        if (function := getattr(extension, name, None)) is not None:
            replaced[function] = _filled(function, fill)
            setattr(extension, name, replaced[function])
    for name, module in list(sys.modules.items()):
        if module is not None and name.split(".")[0] in ("transformer_engine", "megatron", "nemo2"):
            for attribute, value in list(vars(module).items()):
                if callable(value) and type(value).__name__ == "builtin_function_or_method" and value in replaced:
                    setattr(module, attribute, replaced[value])


class _Kernel:
    """A kernel of Triton, whose interpreter would take seconds for a layer. Without ``fill`` a launch has no effect."""

    def __init__(self, fill: Callable[..., None] | None) -> None:
        self.fill = fill

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return _launched if self.fill is None else _filled(_launched, self.fill)


def _launched(*arguments: Any, **keywords: Any) -> None:
    """A launch on a GPU that isn't there."""


def _filled(function: Callable[..., Any], fill: Callable[..., None]) -> Callable[..., Any]:
    def call(*arguments: Any, **keywords: Any) -> Any:
        result = function(*arguments, **keywords)
        with operators.below_autograd():
            if operators.core.pretend_captured():
                parts = [_held(part) for part in (result, *arguments)]
                named = {name: _held(part) for name, part in keywords.items()}
                operators.keep(lambda: fill(*parts, **named))
            else:
                fill(result, *arguments, **keywords)
        return result

    call.__name__, call.__doc__ = function.__name__, function.__doc__
    return call


def _held(part: Any) -> Any:
    """What a captured call works on: the caller may drop the data of its tensors afterwards."""
    if _is_plain(part):
        return part.detach()
    if isinstance(part, (list, tuple)):
        return [_held(inner) for inner in part]
    if _is_blocked(part) or _is_four_bits(part):
        tensors = {name: _held(getattr(part, name)) for name in _BLOCKED_TENSORS if hasattr(part, name)}
        names = ("_fp8_dtype", "_fp4_dtype", "_quantizer", "_is_2D_scaled", "_with_gemm_swizzled_scales")
        return SimpleNamespace(**tensors, **{name: getattr(part, name) for name in names if hasattr(part, name)})
    if _is_quantized(part):
        names = ("_fp8_dtype", "_quantizer", "_transpose_invalid")
        tensors = {name: _held(getattr(part, name, None)) for name in ("_data", "_transpose", "_scale_inv")}
        return SimpleNamespace(**tensors, **{name: getattr(part, name, None) for name in names})
    return part


def values_for(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def register(fill: Callable[..., None]) -> Callable[..., None]:
        VALUES.update(dict.fromkeys(names, fill))
        return fill

    return register


# Tensors


def _is_plain(part: Any) -> bool:
    return type(part) in (Tensor, torch.nn.Parameter)


def _is_quantized(part: Any) -> bool:
    """fp8 with one scale for a tensor."""
    scale = getattr(part, "_scale_inv", None)
    return hasattr(part, "_fp8_dtype") and isinstance(scale, Tensor) and scale.numel() == 1


def _dtype(part: Any) -> torch.dtype:
    kind = part._fp8_dtype
    five = int(kind) == E5M2 if hasattr(kind, "__int__") else "E5M2" in str(kind)
    return torch.float8_e5m2 if five else torch.float8_e4m3fn


def read(part: Any) -> Tensor:
    """Values in fp32, on the CPU."""
    if _is_quantized(part):
        scale = read(part._scale_inv).reshape(())
        if part._data is not None:
            return operators.on_cpu(part._data).view(_dtype(part)).float() * scale
        columns, *leading = part._transpose.shape
        return (
            (operators.on_cpu(part._transpose).view(_dtype(part)).float() * scale)
            .flatten(1)
            .t()
            .reshape(*leading, columns)
        )
    if _is_blocked(part):
        return _read_blocks(part)
    if _is_four_bits(part):
        return _read_four_bits(part)
    part = part.detach()
    return (operators.on_cpu(part) if part.device.type == "cuda" else part).float()


def rows(part: Any) -> Tensor:
    x = read(part)
    return x.reshape(-1, x.shape[-1])


def write(target: Any, values: Tensor, quantizer: Any = None) -> None:
    """Values into a tensor of a GPU, in the target's own format."""
    if _is_plain(target):
        operators.on_cpu(target.detach()).copy_(values.reshape(target.shape))
    elif _is_quantized(target):
        _quantize(target, values.float(), quantizer if quantizer is not None else getattr(target, "_quantizer", None))
    elif _is_blocked(target):
        _quantize_blocks(target, values.float().reshape(-1, values.shape[-1]), quantizer)
    elif _is_four_bits(target):
        _quantize_four_bits(target, values.float().reshape(-1, values.shape[-1]), quantizer)


def _quantize(target: Any, values: Tensor, quantizer: Any) -> None:
    """Scaling by the tensor's own largest value, or, where the quantizer has a scale of past steps, by that. The quantizer learns
    the largest value."""
    dtype = _dtype(target)
    top = torch.finfo(dtype).max
    largest = values.abs().max() if values.numel() else torch.zeros(())
    current = "Current" in type(quantizer).__name__
    scale = top / largest if largest > 0 and torch.isfinite(largest) else torch.ones(())
    if not current and getattr(quantizer, "scale", None) is not None:
        scale = read(quantizer.scale).reshape(())
    history = getattr(quantizer, "amax", None)
    if history is not None and history.numel():
        write(history, largest.expand(history.shape) if current else torch.maximum(read(history), largest))
    if current and getattr(quantizer, "scale", None) is not None and quantizer.scale.numel():
        write(quantizer.scale, scale.expand(quantizer.scale.shape))
    write(target._scale_inv, 1 / scale)
    eight_bits = (values * scale).clamp(-top, top).to(dtype).view(torch.uint8)
    if target._data is not None:
        operators.on_cpu(target._data).copy_(eight_bits.reshape(target._data.shape))
    transposed = getattr(target, "_transpose", None)
    if transposed is not None and not getattr(target, "_transpose_invalid", False):
        operators.on_cpu(transposed).copy_(eight_bits.reshape(-1, eight_bits.shape[-1]).t().reshape(transposed.shape))


# Blocks. Scales stay as a quantization leaves them, never in the order of a product's kernel: only this file reads them.

_BLOCKED_TENSORS = tuple(f"_{side}_{part}" for side in ("rowwise", "columnwise") for part in ("data", "scale_inv")) + (
    "_amax_rowwise",
    "_amax_columnwise",
)


class _Copy(NamedTuple):
    """One of the two copies of a matrix in fp8, whose scales are along the rows or along the columns.

    Attributes:
        block: how many rows and columns of ``codes`` share a scale.
        transposed: whether ``codes`` are those of the transposed matrix.
        scales: the inverse scales by block, as a view of the stored ones, which may be more and in another order.
    """

    codes: Tensor
    scales: Tensor
    block: tuple[int, int]
    transposed: bool


def _is_blocked(part: Any) -> bool:
    """fp8 with a scale per block: MXFP8, or Transformer Engine's own format."""
    return hasattr(part, "_fp8_dtype") and hasattr(part, "_rowwise_scale_inv")


def _copies(part: Any) -> dict[str, _Copy]:
    """What is stored of "rowwise" and "columnwise". MXFP8 stores no transposed codes; blocks of 128 always do."""
    copies = {}
    for name in ("rowwise", "columnwise"):
        codes, scales = getattr(part, f"_{name}_data"), getattr(part, f"_{name}_scale_inv")
        if codes is None:
            continue
        codes, scales = operators.on_cpu(codes), operators.on_cpu(scales)
        if hasattr(part, "_is_2D_scaled"):
            transposed = name == "columnwise"
            codes = codes.reshape(codes.shape[0], -1) if transposed else codes.reshape(-1, codes.shape[-1])
            block = (128, 128) if part._is_2D_scaled else (1, 128)
            copies[name] = _Copy(codes, scales if part._is_2D_scaled else scales.t(), block, transposed)
        else:
            block = (1, 32) if name == "rowwise" else (32, 1)
            copies[name] = _Copy(codes.reshape(-1, codes.shape[-1]), scales, block, False)
    return copies


def _largest(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Of each block, which may stick out at the end."""
    high, wide = block
    whole = F.pad(x.abs(), (0, -x.shape[1] % wide, 0, -x.shape[0] % high))
    return whole.unflatten(1, (-1, wide)).unflatten(0, (-1, high)).amax((1, 3))


def _spread(by_block: Tensor, block: tuple[int, int], shape: Sequence[int]) -> Tensor:
    """A value per block as one per element."""
    return by_block.repeat_interleave(block[0], 0)[: shape[0]].repeat_interleave(block[1], 1)[:, : shape[1]]


def _scale(largest: Tensor, top: float, epsilon: float, power_of_two: bool) -> Tensor:
    """What brings the largest value to ``top``, or at most there with a power of two."""
    finite = torch.finfo(torch.float32).max
    scale = torch.where(largest > 0, (top / largest.clamp(min=epsilon)).clamp(max=finite), 1.0)
    return torch.exp2(scale.log2().floor()) if power_of_two else scale


def _exponent(largest: Tensor, top: float) -> Tensor:
    """MXFP8's inverse scale: a power of two with the bias 127, rounded up as Transformer Engine does: nothing is cut off."""
    mantissa, exponent = torch.frexp(largest / top)
    return (exponent - (mantissa == 0.5).int() + 127).clamp(0, 254) * (largest > 0)


def _codes(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    top = torch.finfo(dtype).max
    return (x * scale).clamp(-top, top).to(dtype).view(torch.uint8)


def _read_blocks(part: Any, name: str = "rowwise") -> Tensor:
    """From the copy of this name, or from the other where it isn't stored."""
    copies = _copies(part)
    copy = copies.get(name) or next(iter(copies.values()))
    scales = copy.scales if copy.scales.dtype == torch.float32 else copy.scales.view(torch.float8_e8m0fnu).float()
    x = copy.codes.view(_dtype(part)).float() * _spread(scales, copy.block, copy.codes.shape)
    if copy.transposed:
        columns, *leading = part._columnwise_data.shape
        return x.t().reshape(*leading, columns)
    return x.reshape((part._columnwise_data if part._rowwise_data is None else part._rowwise_data).shape)


def _quantize_blocks(target: Any, x_RC: Tensor, quantizer: Any) -> None:
    quantizer, dtype = quantizer or target._quantizer, _dtype(target)
    top = torch.finfo(dtype).max
    for copy in _copies(target).values():
        x = x_RC.t() if copy.transposed else x_RC
        largest = _largest(x, copy.block)
        if copy.scales.dtype == torch.float32:
            scale = _scale(largest, top, quantizer.amax_epsilon, quantizer.force_pow_2_scales)
            stored = 1 / scale
        else:
            stored = _exponent(largest, top)
            scale = torch.exp2(127 - stored.float())
        copy.scales.zero_()
        copy.scales[: stored.shape[0], : stored.shape[1]] = stored
        copy.codes.copy_(_codes(x, _spread(scale, copy.block, x.shape), dtype))


# Four bits, NVFP4: blocks of 16 share a scale in e4m3, and the largest value of the matrix stands for a scale of all of them.
# Codes along the columns are those of the transposed matrix, which may be turned first (a random Hadamard transform): in a
# product that sums along the columns the turns of both factors cancel. Gradients are rounded to the nearest code, not at random.

_FOUR_BITS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_BETWEEN = (_FOUR_BITS[1:] + _FOUR_BITS[:-1]) / 2
_TOP = 6.0 * 448.0
"""What the largest value of a matrix is scaled to: the largest code times the largest scale."""


def _is_four_bits(part: Any) -> bool:
    return hasattr(part, "_fp4_dtype")


def _turned(x_RC: Tensor, quantizer: Any, back: bool = False) -> Tensor:
    turn = read(quantizer.rht_matrix)
    return (x_RC.reshape(-1, turn.shape[0]) @ (turn.t() if back else turn)).view(x_RC.shape)


def _quantize_four_bits(target: Any, x_RC: Tensor, quantizer: Any) -> None:
    quantizer = quantizer or target._quantizer
    for name, x in {"rowwise": x_RC, "columnwise": x_RC.t()}.items():
        if getattr(target, f"_{name}_data") is None:
            continue
        if name == "columnwise" and quantizer.with_rht:
            x = _turned(x, quantizer)
        largest = x.abs().max()
        if quantizer.with_amax_reduction:
            group = quantizer._canonicalized_amax_reduction_group()
            shared = largest.to(getattr(target, f"_{name}_data").device)
            torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MAX, group=group)
            largest = read(shared)
        finite = torch.finfo(torch.float32).max
        whole = (_TOP / largest).clamp(max=finite)
        block = (16, 16) if quantizer.with_2d_quantization else (1, 16)
        by_row = _spread(_largest(x, block), (block[0], 1), (x.shape[0], -(-x.shape[1] // 16)))
        stored = (by_row * (whole * (1 / 6))).clamp(max=448).to(torch.float8_e4m3fn)
        scaled = x * _spread((1 / (stored.float() * (1 / whole))).clamp(max=finite), (1, 16), x.shape)
        low, high = (torch.bucketize(scaled.abs().contiguous(), _BETWEEN, right=right) for right in (False, True))
        codes = torch.where(low % 2 == 0, low, high) + 8 * torch.signbit(
            scaled
        )  # to the even one of two that are as near
        packed, scales = (operators.on_cpu(getattr(target, f"_{name}_{part}")) for part in ("data", "scale_inv"))
        packed.copy_((codes[:, ::2] + 16 * codes[:, 1::2]).reshape(packed.shape))
        scales.zero_()
        scales[: stored.shape[0], : stored.shape[1]] = stored.view(torch.uint8)
        write(getattr(target, f"_amax_{name}"), largest)


def _read_four_bits(part: Any, name: str = "rowwise", turned: bool = False) -> Tensor:
    """From the copy of this name, or from the other where it isn't stored. ``turned``: as it is stored along the columns."""
    if getattr(part, f"_{name}_data") is None:
        name = "columnwise" if name == "rowwise" else "rowwise"
    packed, scales = (operators.on_cpu(getattr(part, f"_{name}_{of}")) for of in ("data", "scale_inv"))
    shape = packed.shape
    packed = packed.reshape(shape[0], -1) if name == "columnwise" else packed.reshape(-1, shape[-1])
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1).long()
    x = torch.where(codes > 7, -1, 1) * _FOUR_BITS[codes & 7]
    x = (
        x
        * _spread(scales.view(torch.float8_e4m3fn).float(), (1, 16), x.shape)
        * (read(getattr(part, f"_amax_{name}")) / _TOP)
    )
    if name == "rowwise":
        return x.reshape(*shape[:-1], -1)
    x = x if turned or not part._quantizer.with_rht else _turned(x, part._quantizer, back=True)
    return x.t().reshape(*shape[1:-1], -1, shape[0])


def _operand(part: Any, along_rows: bool) -> Tensor:
    """A matrix as a product reads it that sums along its rows, or along its columns."""
    if _is_four_bits(part):
        x = _read_four_bits(part, "rowwise" if along_rows else "columnwise", turned=True)
    else:
        x = _read_blocks(part, "rowwise" if along_rows else "columnwise") if _is_blocked(part) else read(part)
    return x.reshape(-1, x.shape[-1])


def _product(a: Any, a_transposed: bool, b: Any, b_transposed: bool) -> Tensor:
    """In the order of rows: Transformer Engine's A is the second factor."""
    x, weight = _operand(b, not b_transposed), _operand(a, a_transposed)
    return (x.t() if b_transposed else x) @ (weight.t() if a_transposed else weight)


def derivative(function: Callable[[Tensor], Tensor], x: Tensor, gradient: Tensor) -> Tensor:
    """By autograd, in a thread of its own: this one is below it."""
    found: list[Tensor] = []

    def differentiate() -> None:
        leaf = x.detach().clone().requires_grad_()
        y = function(leaf)
        found.extend(torch.autograd.grad(y, leaf, gradient.reshape(y.shape)))

    thread = threading.Thread(target=differentiate)
    thread.start()
    thread.join()
    return found[0]


# Formats


@values_for("quantize")
def _(result: Any, tensor: Any, quantizer: Any, *rest: Any, **_more: Any) -> None:
    write(result, read(tensor), quantizer)


@values_for("dequantize")
def _(result: Any, tensor: Any, *rest: Any) -> None:
    write(result, read(tensor))


@values_for("bgrad_quantize")
def _(result: Any, gradient: Any, quantizer: Any) -> None:
    write(result[0], rows(gradient).sum(0))
    write(result[1], read(gradient), quantizer)


@values_for("fp8_transpose")
def _(result: Tensor, eight_bits: Tensor, *rest: Any, **_more: Any) -> None:
    values = operators.on_cpu(eight_bits)
    operators.on_cpu(result).copy_(values.reshape(-1, values.shape[-1]).t().reshape(result.shape))


@values_for("swap_first_dims")
def _(result: Tensor, tensor: Tensor, **_more: Any) -> None:
    swapped = operators.on_cpu(tensor).transpose(0, 1)
    operators.on_cpu(result).copy_(swapped.reshape(result.shape))


@values_for("multi_tensor_quantize")
def _(result: Any, tensors: list[Any], quantizers: list[Any], *rest: Any) -> None:
    for target, tensor, quantizer in zip(result, tensors, quantizers, strict=True):
        write(target, read(tensor), quantizer)


@values_for("split_quantize")
def _(result: Any, tensor: Any, sections: list[int], quantizers: list[Any], *rest: Any, **_more: Any) -> None:
    for target, part, quantizer in zip(result, rows(tensor).split(sections), quantizers, strict=True):
        write(target, part, quantizer)


# Weights in fp8 that the distributed optimizer writes from its fragments of the main weights


@values_for("compute_amax")
def _(result: Any, tensor: Tensor, largest: Tensor) -> None:
    write(largest, read(tensor).abs().max())


@values_for("multi_tensor_compute_scale_and_scale_inv")
def _(
    result: Any, chunk: int, flag: Any, tensors: list[list[Tensor]], top: float, power_of_two: bool, epsilon: float
) -> None:
    for largest, scale, inverse in zip(*tensors, strict=True):
        values = _scale(read(largest), top, epsilon, power_of_two)
        write(scale, values)
        write(inverse, 1 / values)


@values_for("multi_tensor_compute_scale_inv_e8m0")
def _(result: Any, chunk: int, flag: Any, tensors: list[list[Tensor]]) -> None:
    for largest, inverse in zip(*tensors, strict=True):
        write(inverse, _exponent(read(largest), torch.finfo(torch.float8_e4m3fn).max))


def _fragment_largest(
    fragment: Tensor, target: Tensor, shape: tuple[int, int], start: int, block: tuple[int, int]
) -> None:
    whole = torch.zeros(shape[0] * shape[1])
    whole[start : start + fragment.numel()] = read(fragment).flatten()
    largest = _largest(whole.view(shape), block)
    operators.on_cpu(target)[: largest.shape[0], : largest.shape[1]] = largest


def _cast_fragment(
    fragment: Tensor, target: Tensor, scale: Tensor, shape: tuple[int, int], start: int, block: tuple[int, int],
    dtype: torch.dtype,
) -> None:  # fmt: skip
    own = _spread(scale, block, shape).flatten()[start : start + fragment.numel()]
    operators.on_cpu(target).copy_(_codes(read(fragment).flatten(), own, dtype).view(target.shape))


@values_for("fp8_block_scaling_compute_partial_amax")
def _(result: Any, fragment: Tensor, largest: Tensor, high: int, wide: int, start: int, block: int) -> None:
    _fragment_largest(fragment, largest, (high, wide), start, (block, block))


@values_for("fp8_block_scaling_partial_cast")
def _(
    result: Any,
    fragment: Tensor,
    target: Tensor,
    scale: Tensor,
    high: int,
    wide: int,
    start: int,
    block: int,
    dtype: Any,
) -> None:
    kind = _dtype(SimpleNamespace(_fp8_dtype=dtype))
    _cast_fragment(fragment, target, read(scale), (high, wide), start, (block, block), kind)


@values_for("mxfp8_scaling_compute_partial_amax")
def _(result: Any, fragment: Tensor, rowwise: Tensor, columnwise: Tensor, high: int, wide: int, start: int) -> None:
    _fragment_largest(fragment, rowwise, (high, wide), start, (1, 32))
    _fragment_largest(fragment, columnwise, (high, wide), start, (32, 1))


@values_for("mxfp8_scaling_partial_cast")
def _(
    result: Any, fragment: Tensor, rowwise: Tensor, columnwise: Tensor, inverse_rowwise: Tensor, inverse_columnwise: Tensor,
    high: int, wide: int, start: int,
) -> None:  # fmt: skip
    for target, inverse, block in ((rowwise, inverse_rowwise, (1, 32)), (columnwise, inverse_columnwise, (32, 1))):
        scale = torch.exp2(127 - read(inverse))
        _cast_fragment(fragment, target, scale, (high, wide), start, block, torch.float8_e4m3fn)


# Matrix products


@values_for("generic_gemm")
def _(
    result: Any, a: Any, a_transposed: bool, b: Any, b_transposed: bool, out: Any, quantizer: Any, dtype: Any, bias: Any,
    bias_dtype: Any, gelu: bool, gelu_in: Any, backward: bool, workspace: Any, size: int, accumulate: bool, *rest: Any,
    comm_overlap: Any = None, bulk_overlap: bool = False, alpha: float = 1.0, beta: float | None = None, **_more: Any,
) -> None:  # fmt: skip
    if comm_overlap is not None and not bulk_overlap:
        return  # with userbuffers, parts of an operand aren't there
    y = alpha * _product(a, a_transposed, b, b_transposed)
    if gelu and backward:
        y = derivative(_gelu, rows(gelu_in), y)
    if bias is not None and backward:
        write(result[1], (y if gelu else rows(b)).sum(0))
    elif bias is not None:
        y = y + read(bias)
    if gelu and not backward:
        write(result[2], y)
        y = _gelu(y)
    if accumulate:
        y = y + (1 if beta is None else beta) * rows(result[0])
    write(result[0], y, quantizer)


@values_for("te_general_grouped_gemm")
def _(
    result: Any, a: list[Any], a_transposed: bool, b: list[Any], b_transposed: bool, out: list[Tensor], dtype: Any,
    splits: list[int], bias: list[Tensor], bias_dtype: Any, single: bool, gelu_in: Any, backward: bool, workspace: Any, size: int,
    accumulate: bool, *rest: Any,
) -> None:  # fmt: skip
    targets = out[0].reshape(-1, out[0].shape[-1]).split(splits) if single else out
    for weight, x, target, shift in zip(a, b, targets, bias, strict=True):
        y = _product(weight, a_transposed, x, b_transposed)
        if shift.numel() and backward:
            write(shift, rows(x).sum(0))
        elif shift.numel():
            y = y + read(shift)
        write(target, y + rows(target) if accumulate else y)


# Norms


@values_for("rmsnorm_fwd")
def _(
    result: Any, x: Any, weight: Any, eps: float, out: Any, quantizer: Any, dtype: Any, sm: int, centered: bool
) -> None:
    x2, gamma = rows(x), read(weight) + int(centered)
    inverse = torch.rsqrt(x2.pow(2).mean(-1) + eps)
    write(result[2], inverse)
    write(result[0], x2 * inverse[:, None] * gamma, quantizer)


@values_for("rmsnorm_bwd")
def _(result: Any, gradient: Any, x: Any, inverse: Any, weight: Any, sm: int, centered: bool) -> None:
    gradient2, x2, gamma = rows(gradient), rows(x), read(weight) + int(centered)
    r = read(inverse).reshape(-1, 1)
    normed, by_weight = x2 * r, gradient2 * gamma
    write(result[0], r * (by_weight - normed * (by_weight * normed).mean(-1, keepdim=True)))
    write(result[1], (gradient2 * normed).sum(0))


@values_for("layernorm_fwd")
def _(
    result: Any, x: Any, weight: Any, bias: Any, eps: float, out: Any, quantizer: Any, dtype: Any, sm: int, centered: bool
) -> None:  # fmt: skip
    x2, gamma = rows(x), read(weight) + int(centered)
    mean = x2.mean(-1)
    inverse = torch.rsqrt((x2 - mean[:, None]).pow(2).mean(-1) + eps)
    write(result[1], mean)
    write(result[2], inverse)
    y = (x2 - mean[:, None]) * inverse[:, None] * gamma
    write(result[0], y if bias is None else y + read(bias), quantizer)


@values_for("layernorm_bwd")
def _(result: Any, gradient: Any, x: Any, mean: Any, inverse: Any, weight: Any, sm: int, centered: bool) -> None:
    gradient2, x2, gamma = rows(gradient), rows(x), read(weight) + int(centered)
    r = read(inverse).reshape(-1, 1)
    normed, by_weight = (x2 - read(mean).reshape(-1, 1)) * r, gradient2 * gamma
    centre, slope = by_weight.mean(-1, keepdim=True), (by_weight * normed).mean(-1, keepdim=True)
    write(result[0], r * (by_weight - centre - normed * slope))
    write(result[1], (gradient2 * normed).sum(0))
    write(result[2], gradient2.sum(0))


# Activations


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _gated(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def product(x: Tensor) -> Tensor:
        gate, value = x.chunk(2, -1)
        return function(gate) * value

    return product


def _activation(name: str, function: Callable[[Tensor], Tensor]) -> None:
    def forward(result: Any, x: Any, quantizer: Any, *rest: Any, **_more: Any) -> None:
        write(result, function(read(x)), quantizer)

    def backward(result: Any, gradient: Any, x: Any, quantizer: Any, *rest: Any, **_more: Any) -> None:
        write(result, derivative(function, read(x), read(gradient)), quantizer)

    VALUES.update({name: forward, f"d{name}": backward})


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


for _name, _function in {"gelu": _gelu, "silu": F.silu, "relu": F.relu, "srelu": _squared_relu}.items():
    _activation(_name, _function)
for _name, _function in {"swiglu": F.silu, "geglu": _gelu, "reglu": F.relu}.items():
    _activation(_name, _gated(_function))


# Attention


def _above_the_diagonal(queries: int, keys: int, offset: int) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).triu(1 + offset)


@values_for("scaled_upper_triang_masked_softmax_forward", "scaled_aligned_causal_masked_softmax_forward")
def _(result: Tensor, scores: Tensor, scale: float) -> None:
    scaled = read(scores) * scale
    queries, keys = scaled.shape[-2:]
    write(result, scaled.masked_fill(_above_the_diagonal(queries, keys, keys - queries), -torch.inf).softmax(-1))


@values_for("scaled_softmax_forward")
def _(result: Tensor, scores: Tensor, scale: float) -> None:
    write(result, (read(scores) * scale).softmax(-1))


@values_for("scaled_masked_softmax_forward")
def _(result: Tensor, scores: Tensor, mask: Tensor, scale: float) -> None:
    write(result, (read(scores) * scale).masked_fill(read(mask).bool(), MASKED).softmax(-1))


@values_for(
    "scaled_upper_triang_masked_softmax_backward",
    "scaled_aligned_causal_masked_softmax_backward",
    "scaled_softmax_backward",
    "scaled_masked_softmax_backward",
)
def _(result: Tensor, gradient: Tensor, softmax: Tensor, scale: float) -> None:
    d, y = read(gradient).clone(), read(softmax)  # the result is the gradient's own memory
    write(result, scale * y * (d - (d * y).sum(-1, keepdim=True)))


def _batch_first(layout: Any) -> bool:
    return str(layout).split("NVTE_")[-1].startswith("BS")


def _heads_first(part: Any, layout: Any) -> Tensor:
    return read(part).permute(*((0, 2, 1, 3) if _batch_first(layout) else (1, 2, 0, 3)))


def _heads_back(x_BHSD: Tensor, layout: Any) -> Tensor:
    return x_BHSD.permute(*((0, 2, 1, 3) if _batch_first(layout) else (2, 0, 1, 3)))


def _scores(q: Tensor, k: Tensor, scale: float, mask: Any, window: Any) -> Tensor:
    scores = (q @ k.transpose(-1, -2)) * scale
    queries, keys = scores.shape[-2:]
    if "CAUSAL" in str(mask):
        offset = keys - queries if "BOTTOM" in str(mask) else 0
        hidden = _above_the_diagonal(queries, keys, offset)
        if window and window[0] >= 0:
            hidden = hidden | ~torch.ones_like(hidden).triu(offset - window[0])
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores


def _has_values(layout: Any, *tensors: Any) -> bool:
    return "THD" not in str(layout) and all(map(_is_plain, tensors))


@values_for("fused_attn_fwd")
def _(result: Any, *arguments: Any, **_more: Any) -> None:
    (_, _, _, scale, _, _, layout, out_layout, _, _, mask, _, window, _, _, _, q, k, v, *_) = arguments
    if not _has_values(layout, q, k, v):
        return
    q, k, v = (_heads_first(part, layout) for part in (q, k, v))
    k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
    scores = _scores(q, k, scale, mask, window)
    total = scores.logsumexp(-1, keepdim=True)
    write(result[0], _heads_back((scores - total).exp().nan_to_num() @ v, out_layout))
    if len(result) > 1 and result[1] is not None and result[1].numel() == total.numel():
        write(result[1], total)


@values_for("fused_attn_bwd")
def _(result: Any, *arguments: Any, **_more: Any) -> None:
    (_, _, scale, _, _, layout, out_layout, d_out_layout, d_layout, *_) = arguments
    mask, window = arguments[12], arguments[14]
    q, k, v, out, d_out, _, statistics, *_ = arguments[19:]
    if not _has_values(layout, q, k, v):
        return
    q, k, v = (_heads_first(part, layout) for part in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    k, v = (part.repeat_interleave(groups, 1) for part in (k, v))
    scores = _scores(q, k, scale, mask, window)
    # Under context parallelism the statistics cover all keys, of which these are a part.
    given = statistics[0] if isinstance(statistics, (list, tuple)) and statistics else None
    fits = given is not None and given.numel() == scores.shape[:3].numel()
    total = read(given).reshape(*scores.shape[:3], 1) if fits else scores.logsumexp(-1, keepdim=True)
    softmax = (scores - total).exp().nan_to_num()
    d_out, out = _heads_first(d_out, d_out_layout), _heads_first(out, out_layout)
    d_scores = softmax * (d_out @ v.transpose(-1, -2) - (d_out * out).sum(-1, keepdim=True)) * scale
    parts = (d_scores @ k, d_scores.transpose(-1, -2) @ q, softmax.transpose(-1, -2) @ d_out)
    for target, part, shared in zip(result, parts, (1, groups, groups), strict=False):
        write(target, _heads_back(part.unflatten(1, (-1, shared)).sum(2), d_layout))


def _rotated(x_SBHD: Tensor, angles: Tensor, interleaved: bool, sign: int) -> Tensor:
    turned, rest = x_SBHD.tensor_split([angles.shape[-1]], -1)
    if interleaved:
        half = torch.stack((-turned[..., 1::2], turned[..., ::2]), -1).reshape(turned.shape)
    else:
        first, second = turned.chunk(2, -1)
        half = torch.cat((-second, first), -1)
    return torch.cat((turned * angles.cos() + half * angles.sin() * sign, rest), -1)


def _rotary(sign: int) -> Callable[..., None]:
    def fill(
        result: Any, x: Any, angles: Any, start: Any, layout: Any, interleaved: bool, cu: Any, cp: int, rank: int
    ) -> None:
        if cu is not None or start is not None:
            return
        batch_first = str(layout).upper().split("NVTE_")[-1].startswith("BS")
        x_SBHD = read(x).transpose(0, 1) if batch_first else read(x)
        chunks = read(angles)[: x_SBHD.shape[0] * cp].chunk(2 * cp)
        y = _rotated(
            x_SBHD,
            torch.cat((chunks[rank], chunks[2 * cp - 1 - rank])) if cp > 1 else torch.cat(chunks),
            interleaved,
            sign,
        )
        write(result, y.transpose(0, 1) if batch_first else y)

    return fill


VALUES |= {"fused_rope_forward": _rotary(1), "fused_rope_backward": _rotary(-1)}


# Experts


@values_for("fused_topk_with_score_function_fwd")
def _(
    result: Any, logits: Tensor, topk: int, before: bool, groups: Any, group_topk: Any, scale: Any, kind: str, bias: Any
) -> None:  # fmt: skip
    """Probabilities and the map of routed tokens, each ``[tokens, experts]``, and what the backward pass reads: the scores."""
    x = read(logits)
    scores = x.softmax(-1) if kind == "softmax" else x.sigmoid() if kind == "sigmoid" else F.softplus(x).sqrt()
    ranking = scores if bias is None else scores + read(bias)
    if groups:
        grouped = ranking.unflatten(-1, (groups, -1))
        best = grouped.topk(topk // group_topk, -1).values.sum(-1).topk(group_topk, -1).indices
        open_ = torch.zeros(grouped.shape[:2]).scatter(-1, best, 1).bool()
        ranking = grouped.masked_fill(~open_[..., None], -torch.inf).flatten(-2)
    chosen = ranking.topk(topk, -1).indices
    picked = scores.gather(-1, chosen)
    if kind == "softmax" and not before:
        picked = x.gather(-1, chosen).softmax(-1)
    elif kind != "softmax" and topk > 1:
        picked = picked / (picked.sum(-1, keepdim=True) + 1e-20)
    write(result[0], torch.zeros_like(x).scatter(-1, chosen, picked * (scale or 1)))
    operators.on_cpu(result[1]).copy_(torch.zeros_like(x).scatter(-1, chosen, 1).bool())
    write(result[2], scores)


# Optimizers


# Tokens in the order of their experts. A row of the map of E experts belongs to a token: the n rows that it goes to, descending,
# from the first column on; their experts from column E on; n in the last.


@values_for("make_row_id_map")
def _row_id_map(result: Tensor, routing_map: Tensor, num_tokens: int, num_experts: int) -> None:
    routed = operators.on_cpu(routing_map) != 0
    rows_by_expert = routed.t().flatten().cumsum(0).reshape(num_experts, num_tokens).t() - 1
    destinations, experts = rows_by_expert.where(routed, -1).sort(1, descending=True)
    operators.on_cpu(result).copy_(torch.cat([destinations, experts, routed.sum(1, keepdim=True)], 1))


def _moves(row_id_map: Tensor, pad_offsets: Tensor | None, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, the rows that they go to, and whose rows these are."""
    known = operators.on_cpu(row_id_map).long()
    tokens, slots = (torch.arange(num_experts) < known[:, -1:]).nonzero(as_tuple=True)
    destinations, experts = known[tokens, slots], known[tokens, num_experts + slots]
    return (
        tokens,
        destinations if pad_offsets is None else destinations + operators.on_cpu(pad_offsets)[experts],
        experts,
    )


@values_for("permute_with_mask_map")
def _permute(
    result: Sequence[Tensor | None],
    inp: Tensor,
    row_id_map: Tensor,
    probs: Tensor | None,
    scale: Tensor | None,
    pad_offsets: Tensor | None,
    num_tokens: int,
    num_experts: int,
    *sizes: int,
) -> None:
    parts: list[Any] = [None if part is None else operators.on_cpu(part) for part in result]
    output, permuted_scale, permuted_probs = parts
    tokens, destinations, experts = _moves(row_id_map, pad_offsets, num_experts)
    moved = operators.on_cpu(inp)[tokens]
    if probs is not None:
        routed = operators.on_cpu(probs)[tokens, experts]
        permuted_probs[destinations] = routed
        moved[routed == 0] = 0  # a row that fills an expert up
    output[destinations] = moved
    if scale is not None:
        permuted_scale[destinations] = operators.on_cpu(scale)[tokens]


@values_for("unpermute_with_mask_map")
def _unpermute(
    result: Sequence[Tensor | None],
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None,
    permuted_probs: Tensor | None,
    pad_offsets: Tensor | None,
    num_tokens: int,
    num_experts: int,
    *sizes: int,
) -> None:
    parts: list[Any] = [None if part is None else operators.on_cpu(part) for part in result]
    output, unpermuted_probs = parts
    tokens, sources, experts = _moves(row_id_map, pad_offsets, num_experts)
    moved = operators.on_cpu(inp)[sources].float()
    if merging_probs is not None:
        moved *= operators.on_cpu(merging_probs)[tokens, experts].float()[:, None]
    output.copy_(torch.zeros(output.shape).index_add_(0, tokens, moved))
    if permuted_probs is not None:
        unpermuted_probs.zero_()[tokens, experts] = operators.on_cpu(permuted_probs)[sources]


@values_for("unpermute_with_mask_map_bwd_with_merging_probs")
def _unpermute_backward(
    result: Sequence[Tensor],
    fwd_output_grad: Tensor,
    row_id_map: Tensor,
    fwd_input: Tensor,
    merging_probs: Tensor,
    pad_offsets: Tensor | None,
    num_tokens: int,
    num_experts: int,
    *sizes: int,
) -> None:
    act_grad, probs_grad = (operators.on_cpu(part) for part in result)
    tokens, rows_of_tokens, experts = _moves(row_id_map, pad_offsets, num_experts)
    gradients = operators.on_cpu(fwd_output_grad)[tokens].float()
    weights = operators.on_cpu(merging_probs)[tokens, experts].float()
    act_grad[rows_of_tokens] = (gradients * weights[:, None]).to(act_grad.dtype)
    products = (operators.on_cpu(fwd_input)[rows_of_tokens].float() * gradients).sum(1)
    probs_grad.zero_()[tokens, experts] = products.to(probs_grad.dtype)


@values_for("make_chunk_sort_map")
def _chunk_sort_map(
    result: Tensor, split_sizes: Tensor, sorted_indices: Tensor, num_tokens: int, num_splits: int
) -> None:
    sizes, order = (
        operators.on_cpu(part).long() if part.device.type == "cuda" else part.long()
        for part in (split_sizes, sorted_indices)
    )
    starts = sizes.cumsum(0) - sizes
    sources = torch.cat([torch.arange(num_tokens)[starts[chunk] : starts[chunk] + sizes[chunk]] for chunk in order])
    destinations = torch.arange(num_tokens)  # of the rows behind all chunks, which stay
    destinations[sources] = torch.arange(len(sources))
    operators.on_cpu(result).copy_(destinations)


@values_for("sort_chunks_by_map")
def _sort_chunks(
    result: Sequence[Tensor | None],
    inp: Tensor,
    row_id_map: Tensor,
    probs: Tensor | None,
    num_tokens: int,
    hidden_size: int,
    is_forward: bool,
) -> None:
    destinations = operators.on_cpu(row_id_map).long()
    for target, source in zip(result, (inp, probs), strict=True):
        if target is not None and is_forward:
            operators.on_cpu(target)[destinations] = operators.on_cpu(source)
        elif target is not None:
            operators.on_cpu(target).copy_(operators.on_cpu(source)[destinations])


# Cross entropy of a vocabulary that ranks share


@values_for("online_softmax_kernel")
def _online_softmax(
    result: None,
    *,
    X_ptr: Tensor,
    Y_ptr: Tensor,
    m_d_X_y_ptr: Tensor,
    rank: int,
    n_cols: int,
    ignore_idx: int,
    n_non_ignore: Tensor,
    **blocks: int,
) -> None:
    x, y = rows(X_ptr), operators.on_cpu(Y_ptr).flatten()
    own = y - rank * n_cols
    largest = x.amax(1)
    of_targets = x.gather(1, own.clamp(0, n_cols - 1)[:, None])[:, 0].where((own >= 0) & (own < n_cols), -torch.inf)
    write(m_d_X_y_ptr, torch.stack([largest, (x - largest[:, None]).exp().sum(1), of_targets], 1))
    operators.on_cpu(n_non_ignore).add_((y != ignore_idx).sum())


@values_for("cross_entropy_kernel")
def _cross_entropy(
    result: None,
    *,
    X_ptr: Tensor,
    Y_ptr: Tensor,
    loss_ptr: Tensor,
    m_d_X_y_ptr: Tensor,
    rank: int,
    world_size: int,
    ignore_idx: int,
    n_cols: int,
    n_non_ignore: Tensor,
    reduce_loss: bool,
    label_smoothing: float,
    **blocks: int,
) -> None:
    """The losses, and the gradients in place of the scores."""
    x, y = rows(X_ptr), operators.on_cpu(Y_ptr).flatten()
    largest, sums, of_targets = read(m_d_X_y_ptr).reshape(world_size, len(y), 3).unbind(-1)
    top = largest.amax(0)
    total = (sums * (largest - top).exp()).sum(0)
    smoothing = label_smoothing / (n_cols * world_size)
    losses = top + total.log() - of_targets.amax(0)
    if label_smoothing > 0:
        smooth = label_smoothing * (top + total.log()) - smoothing * x.sum(1)
        losses = losses * (1 - label_smoothing) + smooth
    gradients = (x - top[:, None]).exp() / total[:, None] - smoothing
    own = y - rank * n_cols
    here = ((own >= 0) & (own < n_cols)).nonzero()[:, 0]
    gradients[here, own[here]] -= 1 - label_smoothing
    if reduce_loss:
        gradients /= read(n_non_ignore)
    counted = y != ignore_idx
    write(X_ptr, gradients * counted[:, None])
    write(loss_ptr, losses.where(counted, 0))


@values_for("element_mul_kernel")
def _element_mul(result: None, x: Tensor, stride: int, gradient: Tensor, *sizes: int, **blocks: int) -> None:
    write(x, rows(x) * read(gradient).reshape(-1, 1))


@values_for("multi_tensor_l2norm")
def _(result: Any, chunk: int, flag: Any, tensors: list[list[Any]], each: Any = False) -> None:
    norms = torch.stack([read(tensor).norm() for tensor in tensors[0]])
    write(result[0], norms.norm().reshape(1))
    if each:
        write(result[1], norms)


@values_for("multi_tensor_scale", "multi_tensor_scale_tensor")
def _(result: Any, chunk: int, flag: Any, tensors: list[list[Any]], scale: Any) -> None:
    factor = read(scale) if isinstance(scale, Tensor) else scale
    for source, target in zip(*tensors, strict=True):
        values = read(source) * factor
        write(target, values)
        if not torch.isfinite(values).all():
            operators.on_cpu(flag).fill_(1)


@values_for("multi_tensor_adam")
def _(result: Any, chunk: int, flag: Any, tensors: list[list[Any]], *settings: Any) -> None:
    for gradient, parameter, first, second, *master in zip(*tensors, strict=True):
        weights = _adam(gradient, read(master[0] if master else parameter), first, second, *settings)
        for target in (parameter, *master):
            write(target, weights)


@values_for("multi_tensor_adam_param_remainder")
def _(result: Any, chunk: int, flag: Any, tensors: list[list[Any]], *settings: Any) -> None:
    """The lower half of the main parameter is stored; the parameter is its upper half, rounded up where the lower is negative."""
    for gradient, parameter, first, second, remainder in zip(*tensors, strict=True):
        upper, lower = operators.on_cpu(parameter).view(torch.int16), operators.on_cpu(remainder)
        bits = ((upper - (lower < 0).short()).int() << 16) | (lower.int() & 0xFFFF)
        bits = _adam(gradient, bits.view(torch.float32), first, second, *settings).view(torch.int32)
        lower.copy_(bits.short())
        upper.copy_((bits >> 16).short() + (bits.short() < 0).short())


def _adam(
    gradient: Any, weights: torch.Tensor, first: Any, second: Any, lr: float, beta1: float, beta2: float, eps: float,
    step: int, decoupled: int, corrected: int, decay: float,
) -> torch.Tensor:  # fmt: skip
    """The new weights, in fp32. The moments are written in place."""
    one, two = (1 - beta1**step, 1 - beta2**step) if corrected else (1, 1)
    slope = read(gradient) + (0 if decoupled else decay * weights)
    m = beta1 * read(first) + (1 - beta1) * slope
    v = beta2 * read(second) + (1 - beta2) * slope * slope
    write(first, m)
    write(second, v)
    return weights - lr * ((m / one) / ((v / two).sqrt() + eps) + (decay * weights if decoupled else 0))
