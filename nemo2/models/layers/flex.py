# SPDX-License-Identifier: Apache-2.0
"""Soft-capped and windowed attention as one kernel, on GPUs: `torch.nn.attention.flex_attention`, compiled.

scaled_dot_product_attention has no soft cap and reads a window as a mask; step by step, the scores of a layer stand in memory
in fp32, twice, for the backward. The compiled kernel makes them piece by piece and leaves out blocks that no query sees. A CPU
has no backward of it.
"""

import functools
from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor

from nemo2.models.layers.attention_rule import AttentionRule
from nemo2.models.layers.notices import say_once

MAX_SHAPES = 7
"""The largest number of compiled shapes. Each shape, including those of trials, compiles a kernel, and torch stops compiling
a function after 8 kernels. Packed sequences have more shapes."""
_TRIAL = 256
_shapes: set[tuple[Any, ...]] = set()


def takes(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, offset: int, *, others: bool) -> bool:
    """Whether the compiled kernel supports this call. ``others``: the call has a mask, a sink or dropout, which the kernel
    doesn't support."""
    if not q.is_cuda or others or (rule.softcap is None and rule.window is None):
        return False
    if q.size(3) != v.size(3) or q.dtype == torch.float64:
        return False
    shape = (rule, offset, *q.shape, *k.shape, q.dtype)
    if shape not in _shapes and len(_shapes) >= MAX_SHAPES:
        say_once(
            f"Attention has had more than {MAX_SHAPES} shapes. Further shapes are not compiled, so their scores stay in memory "
            "for the backward."
        )
        return False
    if shape in _shapes:
        return True
    if not _works(q.dtype, q.size(3), q.device, rule):
        return False
    _shapes.add(shape)
    return True


def attend_compiled(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, offset: int) -> Tensor:
    """`[B, N, S, E]`, as `attend.attend`. ``offset``: how many places the first query stands behind the first key."""
    kernel, _ = _kernels(q.is_cuda)
    return kernel(
        q,
        k,
        v,
        score_mod=_capped(rule.softcap),
        block_mask=_block_mask(rule.left, rule.right, offset, q.size(2), k.size(2), q.device),
        scale=rule.scale,
        enable_gqa=q.size(1) != k.size(1),
    )


@functools.cache
def _kernels(compiled: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The attention and the maker of its block masks."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if not compiled:
        return flex_attention, create_block_mask
    # Not compiled, the maker would hold a mask of all queries and keys.
    return torch.compile(flex_attention, dynamic=False), torch.compile(create_block_mask)


@functools.cache
def _capped(softcap: Optional[float]) -> Optional[Callable[..., Tensor]]:
    """One function for each value, because another object would be compiled again."""
    if softcap is None:
        return None

    def cap(score: Tensor, batch: Any, head: Any, query: Any, key: Any) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


@functools.lru_cache(maxsize=2 * MAX_SHAPES)
def _block_mask(
    left: Optional[int], right: Optional[int], offset: int, num_queries: int, num_keys: int, device: torch.device
) -> Any:
    """The blocks of keys that a block of queries sees; None where every block sees all."""
    if left is None and right is None:
        return None

    def sees(batch: Any, head: Any, query: Any, key: Any) -> Any:
        place = query + offset
        if left is None:
            return key <= place + right
        if right is None:
            return key >= place - left
        return (key <= place + right) & (key >= place - left)

    _, create_block_mask = _kernels(device.type == "cuda")
    return create_block_mask(sees, None, None, num_queries, num_keys, device=device)


@functools.cache
def _works(dtype: torch.dtype, width: int, device: torch.device, rule: AttentionRule) -> bool:
    """Whether forward and backward compile on this machine for heads of this width, tried once on a few tokens. The backward
    compiles only when it first runs, too late for another kernel."""
    _shapes.add(("trial", rule, width, dtype))
    try:
        with torch.enable_grad():
            # No random numbers, which would change those of the run.
            x = torch.linspace(-1, 1, _TRIAL * width, device=device).view(1, 1, _TRIAL, width).to(dtype)
            q, k, v = (x.expand(1, heads, -1, -1).clone().requires_grad_() for heads in (2, 1, 1))
            attend_compiled(q, k, v, rule, 0).float().sum().backward()
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # whatever the compiler raises, attention works without it
        reason = (str(error).strip().splitlines() or [""])[0]
        say_once(
            "flex_attention doesn't compile on this machine, so attention scores stay in memory for the backward: "
            f"{type(error).__name__}: {reason}"
        )
        return False
    return True
