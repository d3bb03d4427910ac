# SPDX-License-Identifier: Apache-2.0
"""Compares the files that a run's data comes from with their record in a checkpoint (`inputs`)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Optional

from nemo2.data.inputs import Input

_HASHED_TO_COMPARE = 32 << 30
"""Bytes of all inputs up to which they are hashed to be compared, while the other ranks wait: some minutes."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Whether an input has the contents of its record. ``now`` has the hash, if it was computed."""

    now: Input
    change: Optional[str] = None
    """The change as a clause. None: there is none."""
    proven: bool = False
    """Whether the contents certainly differ."""


def compare_all(records: Mapping[str, Any], inputs: Iterable[Input]) -> list[Comparison]:
    """Compare inputs with the records of a checkpoint, by path. May read whole files."""
    compared, left = [], _HASHED_TO_COMPARE
    for item in inputs:
        before = records.get(item.path)
        if not isinstance(before, dict):
            compared.append(Comparison(now=item))
            continue
        compared.append(compare(before, item, at_most=left))
        hashed = item.modified != before.get("modified") and compared[-1].now.sha256 is not None
        left -= (item.size or 0) if hashed else 0
    return compared


def compare(before: Mapping[str, Any], now: Input, *, at_most: int = _HASHED_TO_COMPARE) -> Comparison:
    """Compare an input with its record. ``at_most``: the bytes of a file that may be hashed."""
    recorded = before.get("sha256")
    if now.size is not None and now.size != before.get("size"):
        return Comparison(now=now, change=f"has {now.size} bytes, and had {before.get('size')}", proven=True)
    if now.size is not None and now.modified == before.get("modified"):
        return Comparison(now=replace(now, sha256=now.sha256 or recorded))
    if now.size is not None:  # a hash in the file's description may be that of earlier contents
        now = replace(now, sha256=None)
        now = now.hashed() if recorded is not None and (now.size or 0) <= at_most else now
    if recorded is None or now.sha256 is None:
        return Comparison(now=now, change="was written again; whether its contents have changed is unknown")
    if recorded == now.sha256:
        return Comparison(now=now)
    change = "has other contents" if now.exact else "may have other contents"
    return Comparison(now=now, change=change, proven=now.exact)
