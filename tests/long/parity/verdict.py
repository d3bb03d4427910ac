# SPDX-License-Identifier: Apache-2.0
"""The bounds of a row, and whether it keeps them.

In fp32 the bounds are fixed. In bf16 a row may differ from one process by as much as one process differs from itself when
its sums are taken in another order (`tests.long.parity.reordered`): the largest difference between any two of the runs in
`VARIATIONS`, quantity by quantity.
"""

import itertools
from typing import Any

from support import gradients

BOUNDS = {"loss": 1e-5, "grad_norm": 1e-4, "gradient": 1e-4}
"""Largest relative differences over all steps; ``gradient`` is each parameter's at the first step."""

VARIATIONS: list[dict[str, Any]] = [{"parts": parts, "draw": draw} for parts in (2, 4) for draw in range(5)]
"""One process in another order, as arguments of `tests.long.parity.reordered.products`."""


def differences(actual: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    """The three figures of a row and ``parameter``, whose gradient is the worst."""
    errors = actual["errors"]
    parameter = max(errors, key=lambda name: errors[name])
    return {
        "loss": largest(actual["losses"], expected["losses"]),
        "grad_norm": largest(actual["grad_norms"], expected["grad_norms"]),
        "gradient": errors[parameter],
        "parameter": parameter,
    }


def spread(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Bounds out of what runs of one process in different orders of summation, ``gradients`` included, did.

    The largest difference between any two of them, and not only from the first, which may lie at the rim: a layout is one
    more such run, and how far two of them lie apart is known from all pairs.
    """
    found = [
        differences(one | {"errors": gradients.between(one["gradients"], other["gradients"])}, other)
        for one, other in itertools.combinations(runs, 2)
    ]
    return {name: max(difference[name] for difference in found) for name in BOUNDS}


def broken(found: dict[str, Any], bounds: dict[str, float]) -> list[str]:
    """The figures that exceed their bound, by name; empty if the row holds."""
    # Not `found > bound`: a NaN exceeds every bound.
    return [name for name, bound in bounds.items() if not found[name] <= bound]


def largest(actual: list[float], expected: list[float]) -> float:
    """Relative difference over all steps; NaN if there is one."""
    pairs = zip(actual, expected, strict=True)
    ratios = [abs(one - other) / abs(other) for one, other in pairs]
    return max(ratios, key=lambda ratio: (ratio != ratio, ratio))
