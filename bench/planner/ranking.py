# SPDX-License-Identifier: Apache-2.0
"""Whether predictions name the faster of two published layouts."""

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

from bench.planner.rows import Row


class Ranking(NamedTuple):
    """Pairs of layouts, and the share of which the faster one was named; `mean` gives every source the same weight."""

    pairs: int
    right: float
    mean: float


def ranking(rows: Sequence[Row], errors: Sequence[float], *, apart: float = 0.05) -> Ranking:
    """Over all pairs of one source, of the same model on the same GPUs with the same batch, precision and kernels, that lie at
    least ``apart`` from each other: runs of one layout differ by as much. ``errors`` as `bench.planner.fit.error` gives them."""
    groups: dict[tuple[object, ...], list[tuple[float, float]]] = defaultdict(list)
    for row, error in zip(rows, errors, strict=True):
        job = row.job
        key = (
            row.source,
            row.shape,
            job.gpu.name,
            job.gpus,
            job.seq,
            job.global_batch,
            job.precision,
            job.attention,
            job.lora,
        )
        groups[key].append((math.log(row.measured), math.log(row.measured) + error))
    by_source: dict[str, list[bool]] = defaultdict(list)
    for key, found in groups.items():
        for (fast, told_fast), (slow, told_slow) in combinations(found, 2):
            if abs(fast - slow) >= math.log1p(apart):
                by_source[str(key[0])].append((fast > slow) == (told_fast > told_slow))
    every = [right for rights in by_source.values() for right in rights]
    shares = [sum(rights) / len(rights) for rights in by_source.values()]
    return Ranking(len(every), sum(every) / len(every), sum(shares) / len(shares))
