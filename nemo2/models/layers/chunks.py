# SPDX-License-Identifier: Apache-2.0
"""The tokens of a sequence, or of several packed sequences, that a context-parallel rank holds, in their order.

Each sequence is split into 2 * cp chunks of equal length and rank r holds chunks r and 2 * cp - 1 - r, so that causal
attention is the same work on every rank (Megatron-Core's `get_batch_on_this_cp_rank`). Packed sequences are split one by
one, and a rank's tensor holds its two chunks of the first sequence, then its two of the second, and so on (Transformer
Engine's `thd_get_partitioned_indices`).

A sequence is a pair (start, end) of places in the whole pack; an unpacked batch is the one sequence (0, S).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from nemo2.base.errors import DataError

Span = tuple[int, int]


class Chunk(NamedTuple):
    """Tokens that stand next to each other both in their sequence and in the tensor of the rank that holds them."""

    sequence: int
    """Index of the sequence in the pack."""
    places: slice
    """Position of the chunk's tokens in their rank's tensor."""
    position: int
    """Place of the first of them within the sequence."""

    @property
    def length(self) -> int:
        return self.places.stop - self.places.start


def check_divisible(sequences: Sequence[Span], cp: int) -> None:
    """
    Raises:
        DataError: a sequence cannot be split into 2 * cp equal chunks.
    """
    odd = [(start, end) for start, end in sequences if cp > 1 and (end - start) % (2 * cp)]
    if odd:
        start, end = odd[0]
        raise DataError(
            f"{len(odd)} of {len(sequences)} sequences cannot be split for context_parallel_size={cp}. The first is at tokens "
            f"{start} to {end} and has {end - start} tokens, which is not a multiple of 2 * {cp}. Pad each packed sequence to "
            f"a multiple of {2 * cp} tokens, or use context_parallel_size=1."
        )


def chunks_of(sequences: Sequence[Span], cp: int, rank: int) -> list[Chunk]:
    """The chunks of `rank`, in the order of its tensor. The lengths must divide; see `check_divisible`."""
    held, offset = [], 0
    for index, (start, end) in enumerate(sequences):
        if end == start:
            continue
        if cp == 1:
            held.append(Chunk(index, slice(start, end), 0))
            continue
        length = (end - start) // (2 * cp)
        for number in (rank, 2 * cp - 1 - rank):
            held.append(Chunk(index, slice(offset, offset + length), number * length))
            offset += length
    return held


def share_of_rank(x: Tensor, sequences: Sequence[Span], cp: int, rank: int, *, dim: int = 0) -> Tensor:
    """The part of `x`, whole along `dim`, that `rank` holds; a copy where cp > 1.

    Raises:
        DataError: see `check_divisible`.
    """
    if cp == 1:
        return x
    check_divisible(sequences, cp)
    parts = []
    for chunk in chunks_of(sequences, cp, rank):
        start = sequences[chunk.sequence][0] + chunk.position
        parts.append(x.narrow(dim, start, chunk.length))
    return torch.cat(parts, dim=dim)


def in_order(gathered: Tensor, sequences: Sequence[Span], cp: int) -> Tensor:
    """`[T, ...]` in the order of the pack, from the shares of all ranks one after the other along the first dimension."""
    share = gathered.size(0) // cp
    pieces = []
    for rank in range(cp):
        for chunk in chunks_of(sequences, cp, rank):
            start = sequences[chunk.sequence][0] + chunk.position
            pieces.append((start, gathered.narrow(0, rank * share + chunk.places.start, chunk.length)))
    return torch.cat([piece for _, piece in sorted(pieces, key=lambda item: item[0])])


def by_rank(x: Tensor, sequences: Sequence[Span], cp: int) -> Tensor:
    """The inverse of `in_order`: `[T, ...]` in the order of the pack, as the shares of all ranks one after the other."""
    return torch.cat([share_of_rank(x, sequences, cp, rank) for rank in range(cp)])


def gather_in_order(x: Tensor, sequences: Sequence[Span], group: ProcessGroup) -> Tensor:
    """`[T / cp, ...]` of every rank, as `[T, ...]`. The gradient of each rank's part is summed over the ranks."""
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    gathered = gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=group)
    return in_order(gathered, sequences, group.size())
