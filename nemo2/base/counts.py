# SPDX-License-Identifier: Apache-2.0
"""Whole numbers: checks of settings that count something, and counts in sentences."""

from collections.abc import Sequence
from typing import TypeGuard

from nemo2.base.errors import ConfigError


def is_count(value: object, least: int = 1) -> TypeGuard[int]:
    """Whether the value is a whole number of at least ``least``, and not a boolean."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


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
        if not is_count(value, least) and not any(value is one or value == one for one in others)
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
