# SPDX-License-Identifier: Apache-2.0
"""Queries and keys that are changed, after their rotation, before a core attention computes scores.

Llama 4 (arXiv:2501.19399) and Ministral 3 multiply by a factor that grows with a query's position.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Optional

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn

from nemo2.models.layers.chunks import chunks_of

Change = Callable[[Tensor, Tensor, Optional[PackedSeqParams]], tuple[Tensor, Tensor]]


def change_queries_and_keys(core_attention: nn.Module, change: Change) -> None:
    """Make a core attention attend with the result of ``change(query, key, packed_seq_params)``."""
    core_attention.forward = partial(_forward_changed, core_attention.forward, change)


def scale_queries(core_attention: nn.Module, factor: float) -> None:
    """Make a core attention multiply all queries by ``factor``."""
    change_queries_and_keys(core_attention, partial(_scaled, factor))


def sharpen_far_queries(core_attention: nn.Module, *, floor: int, factor: float, first: int = 0) -> None:
    """Make a core attention multiply the query at position p by 1 + ``factor`` ln(1 + floor((p + ``first``) / ``floor``))."""
    change_queries_and_keys(core_attention, partial(_sharpened, floor, factor, first))


def _forward_changed(
    forward: Callable[..., Tensor], change: Change, query: Tensor, key: Tensor, *others: Any, **kwargs: Any
) -> Tensor:
    return forward(*change(query, key, kwargs.get("packed_seq_params")), *others, **kwargs)


def _scaled(factor: float, query: Tensor, key: Tensor, packed: Optional[PackedSeqParams]) -> tuple[Tensor, Tensor]:
    return query * factor, key


def _sharpened(
    floor: int, factor: float, first: int, query: Tensor, key: Tensor, packed: Optional[PackedSeqParams]
) -> tuple[Tensor, Tensor]:
    positions = _positions(query, key, packed)
    scales = 1.0 + factor * torch.log1p(((positions.float() + first) / floor).floor())
    return query * scales.to(query.dtype).view(-1, *[1] * (query.dim() - 1)), key


def _positions(query: Tensor, key: Tensor, packed: Optional[PackedSeqParams]) -> Tensor:
    """The position of each token of this rank in its sequence, ``[tokens]``."""
    cp, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    sequences = [(key.size(0) * cp - query.size(0) * cp, key.size(0) * cp)]
    if packed is not None:
        padded = packed.cu_seqlens_q_padded
        ends = (packed.cu_seqlens_q if padded is None else padded).tolist()
        sequences = list(zip(ends[:-1], ends[1:], strict=True))
    elif cp == 1:
        return torch.arange(*sequences[0], device=query.device)
    positions = torch.zeros(query.size(0), dtype=torch.long, device=query.device)
    for chunk in chunks_of(sequences, cp, rank):
        positions[chunk.places] = torch.arange(chunk.position, chunk.position + chunk.length, device=query.device)
    return positions
