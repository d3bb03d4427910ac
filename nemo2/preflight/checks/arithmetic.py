# SPDX-License-Identifier: Apache-2.0
"""Arithmetic for the messages of rules: divisors and nearby multiples."""

import math
from collections.abc import Iterator
from typing import Any

from nemo2.base.counts import is_count


def indivisible(field: str, value: Any, by: str, unit: Any, *, keep: bool = False) -> Iterator[str]:
    """A message if ``unit``, which ``by`` names, doesn't divide the number of ``field``. With ``keep``, the fix is another
    unit, because another number would be another model. Values that are no numbers break other rules."""
    if is_count(value) and is_count(unit) and value % unit:
        another_unit = f"Set {by.rpartition('.')[2]} to one of {divisors(value)}."
        fix = another_unit if keep else f"Set it to a multiple; nearest: {nearest(value, unit)}."
        yield f"{field}={value} is not a multiple of {by}={unit}. {fix}"


def nearest(value: int, unit: int) -> str:
    """The multiples of `unit` around `value`, as words: ``8188 or 8192``."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below > 0 else str(unit)


def divisors(value: int) -> str:
    """The divisors of `value` up to 64: ``1, 2, 4, 8``."""
    return ", ".join(str(size) for size in divisors_of(value) if size <= 64)


def divisors_of(value: int) -> list[int]:
    """All divisors of a positive number, ascending."""
    low = [size for size in range(1, math.isqrt(max(0, value)) + 1) if value % size == 0]
    return sorted({*low, *(value // size for size in low)})
