# SPDX-License-Identifier: Apache-2.0
"""Whole numbers: checks of settings that count something, and counts for people."""

from collections.abc import Sequence
from typing import Optional, TypeGuard

from nemo2.base.errors import ConfigError


def is_count(value: object, least: int = 1) -> TypeGuard[int]:
    """Whether the value is a whole number of at least ``least``, and not a boolean."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object) -> TypeGuard[float]:
    """Whether the value is a number, and not a boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def count_problems(owner: str, *, least: int = 1, others: Sequence[str | None] = (), **counts: object) -> list[str]:
    """A sentence for each of the settings in ``counts`` that isn't a whole number of at least ``least``.

    Args:
        owner: What has the settings, such as "strategy". "": they have no owner.
        others: Further values that they may have, such as None.
    """
    prefix, choices = f"{owner}." if owner else "", "".join(f", or {one!r}" for one in others)
    return [
        f"{prefix}{name}={value!r}: must be a whole number of at least {least}{choices}."
        for name, value in counts.items()
        if not is_count(value, least) and not any(value is other or value == other for other in others)
    ]


def require_counts(owner: str, *, least: int = 1, others: Sequence[str | None] = (), **counts: object) -> None:
    """Refuse settings that aren't counts, see `count_problems`.

    Raises:
        ConfigError: some of them aren't.
    """
    if problems := count_problems(owner, least=least, others=others, **counts):
        raise ConfigError("\n".join(problems))


def counted(number: int, noun: str, plural: str = "") -> str:
    """A count in a sentence: ``1 sample``, ``2,000 samples``. ``plural``: by default the noun with an s."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def short_count(value: Optional[float]) -> str:
    """``8030000000`` as ``8.03B``, for people rather than for parsing; a dash for None."""
    if value is None:
        return "-"
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.3g}"


def byte_size(count: float) -> str:
    """``1288490189`` bytes as ``1.2 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.1f} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    return f"{count:.1f} TiB"
