# SPDX-License-Identifier: Apache-2.0
"""Finds the legal layouts nearest to an illegal one, for the same GPUs and the same batch."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Optional

from nemo2.mcore.parallel.layout import SIZE_FIELDS, Layout
from nemo2.preflight.checks.arithmetic import divisors_of
from nemo2.preflight.checks.facts import Facts
from nemo2.preflight.checks.megatron import refused
from nemo2.preflight.checks.table import LAYOUT_TOPICS, RULES, apply_rules

MOST_TENSOR_RANKS = 64
"""The largest proposed size. It exceeds any machine's fast links, so nobody wants larger sizes."""


def nearest_layouts(facts: Facts, limit: int = 3) -> list[tuple[Layout, list[str]]]:
    """Legal layouts, nearest first, each with the changes that lead to it.

    The distance is the sum of the binary logarithms of the factors by which sizes change. Of two equally near layouts,
    the layout that changes fewer sizes comes first. Only rules that a layout can break count, so other problems of the
    recipe don't empty the list. Each returned layout also passes Megatron-Core's own checks. Empty: no layout of these
    GPUs is legal.
    """
    if not facts.sizes:
        return []
    layouts: list[tuple[Layout, list[str]]] = []
    for _, layout in sorted(
        ((_distance(facts.layout, candidate), candidate) for candidate in _candidates(facts)), key=lambda item: item[0]
    ):
        changes = layout.overrides(facts.sizes)
        if changes and has_legal_layout(replace(facts, layout=layout)):
            layouts.append((layout, changes))
        if len(layouts) == limit:
            break
    return layouts


def has_legal_layout(facts: Facts) -> bool:
    """Whether the layout breaks no rule and passes Megatron-Core's own checks. Problems of every layout don't count."""
    return not (apply_rules(facts, [rule for rule in RULES if rule.topic in LAYOUT_TOPICS]) or refused(facts))


def _candidates(facts: Facts) -> Iterator[Layout]:
    world, experts = facts.world_size, facts.of_model("num_moe_experts")
    layers = facts.of_model("num_layers")
    chunks: list[Optional[int]] = [None]
    if isinstance(layers, int) and layers > 0 and not facts.is_hybrid:
        chunks += [size for size in divisors_of(layers) if 1 < size <= 16]
    for tp, pp, cp in product(*[divisors_of(world)] * 3):
        if world % (tp * pp * cp) or tp > MOST_TENSOR_RANKS:
            continue
        for vp in chunks if pp > 1 else [None]:
            for ep in divisors_of(world // pp) if experts else [1]:
                for etp in _expert_tensor_sizes(facts.layout.etp, tp) if experts else [None]:
                    yield Layout(
                        tp=tp, pp=pp, vp=vp, cp=cp, ep=ep, etp=etp, sp=tp > 1 and (facts.layout.sp or bool(experts))
                    )


def _expert_tensor_sizes(requested: Optional[int], tp: int) -> list[Optional[int]]:
    """The requested size, None and 1; with one tensor-parallel rank, None and 1 are the same size."""
    return list(dict.fromkeys([requested] if tp == 1 and requested in (None, 1) else [requested, None, 1]))


def _distance(requested: Layout, layout: Layout) -> tuple[float, int]:
    total, changed = 0.0, 0
    for name in SIZE_FIELDS:
        before, after = getattr(requested, name), getattr(layout, name)
        if name == "etp":
            before, after = before or requested.tp, after or layout.tp
        steps = abs(math.log2((after or 1) / (before or 1)))
        total, changed = total + steps, changed + (steps > 0)
    return total + 0.25 * (requested.sp != layout.sp), changed
