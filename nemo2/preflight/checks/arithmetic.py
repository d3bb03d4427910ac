# SPDX-License-Identifier: Apache-2.0
"""Arithmetic for the messages of rules: divisors and nearby multiples."""

import math


def nearest(value: int, unit: int) -> str:
    """The multiples of `unit` around `value`, as words: ``8188 or 8192``."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below > 0 else str(unit)


def divisors(value: int, limit: int = 64) -> str:
    """The divisors of `value` up to `limit`: ``1, 2, 4, 8``."""
    return ", ".join(str(size) for size in divisors_of(value) if size <= limit)


def divisors_of(value: int) -> list[int]:
    """All divisors of a positive number, ascending."""
    low = [size for size in range(1, math.isqrt(max(0, value)) + 1) if value % size == 0]
    return sorted({*low, *(value // size for size in low)})
