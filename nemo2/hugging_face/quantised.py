# SPDX-License-Identifier: Apache-2.0
"""Dequantises released weights of less than 16 bits.

Two formats have a documented meaning: DeepSeek V3's FP8 with a factor for each block of 128 x 128
(github.com/deepseek-ai/DeepSeek-V3, ``inference/fp8_cast_bf16.py``) and GPT-OSS's MXFP4, 32 numbers of four bits with a power of
two (OCP Microscaling Formats 1.0, section 5; github.com/openai/gpt-oss, ``gpt_oss/torch/weights.py``).
"""

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Optional, Protocol

import torch
from torch import Tensor

from nemo2.checkpoint.reading import Stored

_ALL = slice(None)
_PER_BYTE, _PER_FACTOR = 2, 32
_FOUR_BITS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FACTOR_BIAS = 127


class Source(Protocol):
    """A tensor of a release, quantised or not."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...

    def part(self, at: Optional[int], rows: slice, columns: slice) -> Tensor:
        """``rows`` and ``columns`` of the tensor, or of its slice at ``at`` on the first axis. May be a view of the
        file."""
        ...


@dataclass(frozen=True)
class Plain:
    """A tensor in its stored form."""

    stored: Stored

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.stored.dtype

    def part(self, at: Optional[int], rows: slice, columns: slice) -> Tensor:
        return _cut(mapped(self.stored), at, rows, columns)


@dataclass(frozen=True)
class ScaledBlocks:
    """FP8 numbers in blocks. The factors in ``weight_scale_inv`` multiply their blocks."""

    stored: Stored
    factors: Stored
    block: tuple[int, int]
    dtype: torch.dtype = torch.bfloat16

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    def part(self, at: Optional[int], rows: slice, columns: slice) -> Tensor:
        numbers = _cut(mapped(self.stored), at, rows, columns).float()
        factors = mapped(self.factors) if at is None else mapped(self.factors)[at]
        row = torch.arange(self.shape[-2])[rows] // self.block[0]
        column = torch.arange(self.shape[-1])[columns] // self.block[1]
        return (numbers * factors[row][:, column].float()).to(self.dtype)


@dataclass(frozen=True)
class Packed:
    """MXFP4: ``blocks`` [experts, out, in / 32, 16] and ``scales`` [experts, out, in / 32], for a tensor [experts, in, out]."""

    blocks: Stored
    scales: Stored
    dtype: torch.dtype = torch.bfloat16

    @property
    def shape(self) -> tuple[int, ...]:
        experts, out, groups, _ = self.blocks.shape
        return experts, groups * _PER_FACTOR, out

    def part(self, at: Optional[int], rows: slice, columns: slice) -> Tensor:
        assert at is not None
        blocks, scales = mapped(self.blocks)[at][columns], mapped(self.scales)[at][columns]
        values = torch.tensor([*_FOUR_BITS, *(-value for value in _FOUR_BITS)], dtype=self.dtype)
        pairs = torch.stack([values[(blocks & 0x0F).long()], values[(blocks >> 4).long()]], dim=-1)
        powers = (scales.to(torch.int32) - _FACTOR_BIAS)[..., None]
        numbers = torch.ldexp(pairs.flatten(-2), powers)
        return numbers.flatten(-2).transpose(0, 1)[rows]


def sources(tensors: Mapping[str, Stored], config: Mapping[str, Any]) -> dict[str, Source]:
    """The tensors of a release by their names in an unquantised release. Tensors in other quantised formats stay as
    they are."""
    by_name: dict[str, Source] = {}
    block = (config.get("quantization_config") or {}).get("weight_block_size")
    factors = {f"{name}_scale_inv" for name in tensors}
    factors |= {f"{name.removesuffix('_blocks')}_scales" for name in tensors if name.endswith("_blocks")}
    for name, stored in tensors.items():
        base = name.removesuffix("_blocks")
        if name.endswith("_blocks") and f"{base}_scales" in tensors:
            by_name[base] = Packed(stored, tensors[f"{base}_scales"])
        elif stored.dtype == torch.float8_e4m3fn and f"{name}_scale_inv" in tensors and block:
            by_name[name] = ScaledBlocks(stored, tensors[f"{name}_scale_inv"], (int(block[0]), int(block[1])))
        elif name not in factors:
            by_name[name] = Plain(stored)
    return by_name


def mapped(stored: Stored) -> Tensor:
    """The tensor as a view of its file. Only accessed parts are read. The view must not be written to."""
    if not (count := stored.num_bytes):
        return torch.empty(stored.shape, dtype=stored.dtype)
    begin = stored.place - stored.place % mmap.ALLOCATIONGRANULARITY
    with open(stored.file, "rb") as file:
        # A private mapping is writable; torch would warn about read-only memory.
        memory = mmap.mmap(file.fileno(), stored.place - begin + count, access=mmap.ACCESS_COPY, offset=begin)
    flat = torch.frombuffer(memory, dtype=torch.uint8, offset=stored.place - begin, count=count)
    if stored.place % stored.dtype.itemsize:
        flat = flat.clone()  # unaligned elements
    return flat.view(stored.dtype).view(stored.shape)


def _cut(whole: Tensor, at: Optional[int], rows: slice, columns: slice) -> Tensor:
    part = whole if at is None else whole[at]
    part = part[rows]
    return part[:, columns] if part.dim() > 1 and columns != _ALL else part
