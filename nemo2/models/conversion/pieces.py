# SPDX-License-Identifier: Apache-2.0
"""The rows of a Hugging Face file's tensors that make up a nemo2 tensor.

A tensor as Megatron-Core stores it (one layer's, one expert's) is a list of `Piece`, stacked along its first axis. An
`Operation` makes the list from names and sizes. Both directions read the same list: the import puts the pieces together
and the export separates them, so a table of operations can't differ between the directions.

    one(a)                       all of ``a``
    one(a, start)                the rows of ``a`` from ``start`` on, as many as nemo2's tensor has
    one(a, transposed=True)      ``a`` is stored [in, out], as in GPT-2's Conv1D
    one(a, stacked=True)         ``a`` holds all experts along an additional first axis
    cat(a, b)                    ``a``, then ``b``: gate, then up
    qkv(q, k, v)                 for each query group the rows of its queries, its key and its value; weights and biases
    fused_qkv(a)                 `qkv` of one tensor with all q, then all k, then all v
    one(a, at=0)                 ``a`` has an additional first axis of size 1
    every_other(a)               rows 0, 2, 4 ... of ``a``, then rows 1, 3, 5 ...: gate and up interleaved
    gated_qkv(q, k, v)           for each query group its queries, the gates of their outputs, its key and its value, where ``q``
                                 has each head's query and gate one after the other
    strided(a, start, ...)       blocks of rows of ``a`` at equal distances
    normalised(operation)        rows are scaled to length 1 on import, and exported unchanged

In names the first ``*`` is the number of the layer. The second ``*``, or the only one of a tensor outside layers, is
the expert's.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Optional

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Rows ``start``, ``start + step`` ... up to ``stop`` of the tensor ``name`` of a file."""

    name: Optional[str]
    """None: the file doesn't have these rows, and they are zeros."""
    start: int
    stop: int
    step: int = 1
    transposed: bool = False
    """Whether the rows are those of the tensor with its last two axes exchanged."""
    at: Optional[int] = None
    """The index in the first axis of the file's tensor. None: the tensor isn't stacked."""
    normalised: bool = False
    """Whether the import divides each row by its Euclidean length."""

    @property
    def rows(self) -> int:
        return len(range(self.start, self.stop, self.step))


@dataclass(frozen=True, kw_only=True)
class Place:
    """The nemo2 tensor, and the sizes that are needed to divide it."""

    rows: int
    """The rows of nemo2's tensor that the file has. Further rows are padding."""
    layer: Optional[int] = None
    expert: Optional[int] = None
    heads: int = 1
    groups: int = 1
    head_dim: int = 1


_Cut = Callable[[tuple[str, ...], Place], tuple[Piece, ...]]


@dataclass(frozen=True)
class Operation:
    """The operation that makes a nemo2 tensor from the file's tensors ``names``."""

    names: tuple[str, ...]
    cut: _Cut
    normalised: bool = False

    def renamed(self, name: Callable[[str], str]) -> "Operation":
        return replace(self, names=tuple(name(one) for one in self.names))

    def pieces(self, place: Place) -> tuple[Piece, ...]:
        """The pieces of one tensor.

        Raises:
            ValueError: the pieces and the tensor have different numbers of rows, which is a mistake in a table.
        """
        names = tuple(_filled_in(name, place) for name in self.names)
        pieces = tuple(piece for piece in self.cut(names, place) if piece.rows)
        if self.normalised:
            pieces = tuple(replace(piece, normalised=True) for piece in pieces)
        if (there := sum(piece.rows for piece in pieces)) != place.rows:
            raise ValueError(f"{', '.join(names)}: the pieces have {there} rows, and the tensor has {place.rows}")
        return pieces


def one(
    name: str, start: int = 0, *, transposed: bool = False, stacked: bool = False, at: Optional[int] = None
) -> Operation:
    """The rows of ``name`` from ``start`` on. With ``stacked``: of the expert's part of it. ``at``: of this part."""

    def cut(names: tuple[str, ...], place: Place) -> tuple[Piece, ...]:
        part = place.expert if stacked else at
        return (Piece(name=names[0], start=start, stop=start + place.rows, transposed=transposed, at=part),)

    return Operation((name,), cut)


def cat(first: str, second: str) -> Operation:
    """Two tensors of equal size, one below the other."""

    def cut(names: tuple[str, ...], place: Place) -> tuple[Piece, ...]:
        return tuple(Piece(name=name, start=0, stop=place.rows // 2) for name in names)

    return Operation((first, second), cut)


def qkv(query: str, key: str, value: str) -> Operation:
    """Megatron-Core's order: for each query group the rows of its queries, its key, its value."""

    def cut(names: tuple[str, ...], place: Place) -> tuple[Piece, ...]:
        return _by_group(place, (names[0], 0), (names[1], 0), (names[2], 0))

    return Operation((query, key, value), cut)


def fused_qkv(name: str, *, transposed: bool = False) -> Operation:
    """`qkv` of one tensor with all queries, then all keys, then all values."""

    def cut(names: tuple[str, ...], place: Place) -> tuple[Piece, ...]:
        queries, keys = place.heads * place.head_dim, place.groups * place.head_dim
        pieces = _by_group(place, (names[0], 0), (names[0], queries), (names[0], queries + keys))
        return tuple(replace(piece, transposed=transposed) for piece in pieces)

    return Operation((name,), cut)


def gated_qkv(query: str, key: str, value: str) -> Operation:
    """`qkv` of heads whose output has a gate: Megatron-Core has the gates of a group's heads behind their queries."""

    def cut(names: tuple[str, ...], place: Place) -> tuple[Piece, ...]:
        heads, width = place.heads // place.groups, place.head_dim
        pieces = []
        for group in range(place.groups):
            of_group = range(group * heads, (group + 1) * heads)
            starts = [(2 * head + gate) * width for gate in (0, 1) for head in of_group]
            pieces += [Piece(name=names[0], start=start, stop=start + width) for start in starts]
            pieces += [Piece(name=name, start=group * width, stop=(group + 1) * width) for name in names[1:]]
        return tuple(pieces)

    return Operation((query, key, value), cut)


def strided(name: str, start: int, *, length: int, step: int) -> Operation:
    """Blocks of ``length`` rows, the first at row ``start``, each ``step`` rows behind the one before."""

    def cut(names: tuple[str, ...], place: Place) -> tuple[Piece, ...]:
        firsts = (start + block * step for block in range(place.rows // length))
        return tuple(Piece(name=names[0], start=first, stop=first + length) for first in firsts)

    return Operation((name,), cut)


def every_other(name: str, *, transposed: bool = False, stacked: bool = False) -> Operation:
    """Reorder rows: even rows first, then odd rows."""

    def cut(names: tuple[str, ...], place: Place) -> tuple[Piece, ...]:
        at = place.expert if stacked else None
        return tuple(
            Piece(name=names[0], start=first, stop=place.rows, step=2, transposed=transposed, at=at) for first in (0, 1)
        )

    return Operation((name,), cut)


def normalised(operation: Operation) -> Operation:
    """Rows of length 1, which Baichuan's output layer uses, whatever lengths are stored."""
    return replace(operation, normalised=True)


def _by_group(place: Place, query: tuple[str, int], key: tuple[str, int], value: tuple[str, int]) -> tuple[Piece, ...]:
    """The pieces of `qkv`. Each argument is a name and the first row of its first head."""
    queries, width = place.heads // place.groups * place.head_dim, place.head_dim
    return tuple(
        Piece(name=name, start=first + group * length, stop=first + (group + 1) * length)
        for group in range(place.groups)
        for (name, first), length in ((query, queries), (key, width), (value, width))
    )


def _filled_in(name: str, place: Place) -> str:
    for number in (place.layer, place.expert):
        if number is not None:
            name = name.replace("*", str(number), 1)
    return name
