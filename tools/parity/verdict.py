# SPDX-License-Identifier: Apache-2.0
"""What a row must show, and whether it does.

In fp32 the bounds are fixed. In bf16 a row may differ from one process by as much as one process differs from itself when
its sums are taken in another order (`tools.parity.reordered`): the largest difference over `VARIATIONS`, quantity by
quantity.
"""

from typing import Any

BOUNDS = {"loss": 1e-5, "grad_norm": 1e-4, "gradient": 1e-4}
"""Largest relative differences over all steps; ``gradient`` is each parameter's at the first step."""

VARIATIONS: list[dict[str, Any]] = [
    {"order": "backwards"},
    {"parts": 2},
    {"parts": 4},
    {"parts": 8},
    {"parts": 2, "order": "backwards"},
    {"parts": 4, "order": "backwards"},
]
"""One process in another order: samples within a global batch, and matrix products in so many rounded parts."""


def differences(actual: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    """The three figures of a row and ``parameter``, whose gradient is the worst."""
    errors = actual["errors"]
    parameter = max(errors, key=lambda name: errors[name])
    return {
        "loss": _largest(actual["losses"], expected["losses"]),
        "grad_norm": _largest(actual["grad_norms"], expected["grad_norms"]),
        "gradient": errors[parameter],
        "parameter": parameter,
    }


def spread(variations: list[dict[str, Any]]) -> dict[str, float]:
    """Bounds out of the differences that other orders of summation make."""
    return {name: max(found[name] for found in variations) for name in BOUNDS}


def broken(found: dict[str, Any], bounds: dict[str, float]) -> list[str]:
    """The figures that exceed their bound, by name; empty if the row holds."""
    # Not `found > bound`: a NaN exceeds every bound.
    return [name for name, bound in bounds.items() if not found[name] <= bound]


def _largest(actual: list[float], expected: list[float]) -> float:
    pairs = zip(actual, expected, strict=True)
    ratios = [abs(one - other) / abs(other) for one, other in pairs]
    return max(ratios, key=lambda ratio: (ratio != ratio, ratio))
