# SPDX-License-Identifier: Apache-2.0
"""Spans of computation and communication on one rank, and how much of each kind of communication is hidden.

Communication is hidden while the rank computes. During communication that is not hidden the rank does nothing else.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

COMPUTE = "compute"
Interval = tuple[float, float]

KINDS = {
    "dp": "data parallel",
    "pp": "pipeline parallel",
    "tp": "tensor parallel",
    "cp": "context parallel",
    "ep": "expert parallel",
    "expert_dp": "expert data parallel",
    "other": "other groups",
}
"""Kinds of communication, by the purpose of their process group."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """An operation from ``start`` to ``end``, in microseconds on the rank's clock."""

    kind: str
    """`COMPUTE` or one of `KINDS`."""
    name: str
    start: float
    end: float
    size_bytes: int = 0
    """The bytes that this rank sends or reduces. 0: the trace doesn't contain them."""


@dataclass(frozen=True, kw_only=True)
class Hidden:
    """All communication of one kind in a trace. Times are in microseconds."""

    kind: str
    count: int
    total: float
    """The time in which at least one operation of this kind is in progress."""
    hidden: float
    """The part of ``total`` in which the rank computes."""
    size_bytes: int

    @property
    def fraction(self) -> float:
        return self.hidden / self.total if self.total else 0.0


@dataclass(frozen=True)
class RankTrace:
    """The spans of a rank."""

    rank: int
    spans: Sequence[Span]

    @property
    def start(self) -> float:
        return min((span.start for span in self.spans), default=0.0)

    @property
    def end(self) -> float:
        return max((span.end for span in self.spans), default=0.0)

    def of(self, kind: str) -> list[Span]:
        return [span for span in self.spans if span.kind == kind]

    @cached_property
    def busy(self) -> list[Interval]:
        """The intervals in which the rank computes, without overlaps, in order."""
        return union((span.start, span.end) for span in self.of(COMPUTE))

    def hidden(self) -> list[Hidden]:
        """The hidden time of each kind of communication in the trace, in the order of `KINDS`."""
        hidden = []
        for kind in KINDS:
            spans = self.of(kind)
            if not spans:
                continue
            under_way = union((span.start, span.end) for span in spans)
            hidden.append(
                Hidden(
                    kind=kind,
                    count=len(spans),
                    total=length(under_way),
                    hidden=length(intersection(under_way, self.busy)),
                    size_bytes=sum(span.size_bytes for span in spans),
                )
            )
        return hidden


def kind_of_group(description: str) -> str:
    """The kind of a process group, from Megatron-Core's description of it, such as ``DATA_PARALLEL_GROUP_WITH_CP``.

    A group over two kinds of ranks, such as the data- and context-parallel ranks that reduce the loss, has the kind
    that is first in the list below.
    """
    name = description.upper()
    for part, kind in (
        ("EXPERT_DATA_PARALLEL", "expert_dp"),
        ("INTER_PARTIAL_EXPERT", "expert_dp"),
        ("EXPERT", "ep"),
        ("PIPELINE", "pp"),
        ("EMBEDDING", "pp"),
        ("TENSOR_AND_DATA", "dp"),
        ("DATA_PARALLEL", "dp"),
        ("DISTRIBUTED_OPTIMIZER", "dp"),
        ("CONTEXT_PARALLEL", "cp"),
        ("TENSOR", "tp"),
    ):
        if part in name:
            return kind
    return "other"


def kernel_kind(name: str, description: str) -> str:
    """The kind of a collective or message, from its name and its group's description.

    With two stages Megatron-Core uses the world's group for one direction, so that the two directions don't wait for
    each other (``p2p_communication._p2p_ops``). The world's group has no description, so its messages count as pipeline
    parallel.
    """
    kind = kind_of_group(description)
    return "pp" if kind == "other" and name in ("send", "recv") else kind


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of the intervals, without overlaps, in order. Empty intervals are dropped."""
    merged: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersection(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """The time in both ``one`` and ``other``. The intervals of each must be ordered and must not overlap."""
    overlaps, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            overlaps.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return overlaps


def difference(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """The time in ``one`` but not in ``other``. The intervals of each must be ordered and must not overlap."""
    ends = [-math.inf, *(end for _, end in other)]
    starts = [*(start for start, _ in other), math.inf]
    return intersection(one, list(zip(ends, starts, strict=True)))


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
