# SPDX-License-Identifier: Apache-2.0
"""Rows of tables with the valid values of fields, and the check of a configuration against its table.

None is left to the field's class, because it stands for a default. A list or tuple is checked item by item. NaN and the
infinities are rejected unless a row includes them.
"""

import math
import numbers
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Optional

from nemo2.base.errors import ConfigError
from nemo2.base.names import did_you_mean
from nemo2.config.aliases import decided_elsewhere
from nemo2.config.walk import class_of

_LOWER = {"[": (operator.ge, "at least"), "(": (operator.gt, "above")}
_UPPER = {"]": (operator.le, "at most"), ")": (operator.lt, "less than")}
_INT64 = 2**63 - 1


@dataclass(frozen=True)
class Domain:
    """The numbers that a field may have.

    Args:
        interval: The interval as text. ``[`` and ``]`` include the edge, ``(`` and ``)`` exclude it: ``"(0, inf)"``.
        why: The use of the value, as the reason for the interval.
        kind: ``whole`` numbers; ``steps``, which may be written as 1e4; or ``real`` numbers.
        items: The interval of a list's items, if it differs.
        unless: The value to use in place of a refused value.
        but: Numbers inside the interval that the field must not have.
        length: The number of numbers in a value. None: one number, or a list of any length.
        most: The largest accepted whole number, which is beyond any machine.
    """

    interval: str
    why: str
    kind: str = "real"
    items: Optional[str] = None
    unless: str = ""
    but: tuple[float, ...] = ()
    length: Optional[int] = None
    most: int = _INT64

    def holds(self, value: Any) -> bool:
        """Whether a field may have this value. Where it has ``length`` numbers, its type rules out a single number, unless
        its class accepts one."""
        if value is None:
            return True
        if isinstance(value, list | tuple):
            return self.length in (None, len(value)) and all(
                self._holds(item, self.items or self.interval) for item in value if item is not None
            )
        return self._holds(value, self.interval)

    def _holds(self, value: Any, interval: str) -> bool:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            return False
        if isinstance(value, numbers.Integral) and abs(int(value)) > self.most:
            return False  # torch's sizes have 64 bits, and floats can't represent such numbers
        if math.isnan(value) or (self.kind == "whole" and not isinstance(value, numbers.Integral)):
            return False
        low, high = map(float, interval[1:-1].split(", "))
        number = float(value)
        if number in self.but:
            return False
        if self.kind == "steps" and not number.is_integer():
            return False
        if math.isinf(number) and not (interval.endswith("inf]") and number > 0):
            return False
        return _LOWER[interval[0]][0](value, low) and _UPPER[interval[-1]][0](value, high)

    @property
    def words(self) -> str:
        """The numbers in words: ``a whole number of at least 1``."""
        whole = self.kind != "real"
        words = _words(self.interval, whole=whole)
        if self.length is not None:
            return f"{self.length} numbers, each {words}"
        words += f" and at most {self.most:,}" if self.most < _INT64 else ""
        words += f" other than {' and '.join(f'{number:g}' for number in self.but)}" if self.but else ""
        return (
            (f"{words}, or a list of numbers between {self.items[1:-1].replace(', ', ' and ')}")
            if self.items
            else words
        )


@dataclass(frozen=True)
class Choice:
    """The texts that a field may have. The methods and fields are those of `Domain`."""

    texts: tuple[str, ...]
    why: str
    unless: str = ""

    def holds(self, value: Any) -> bool:
        """Whether a field may have this value. A list is checked item by item."""
        return all(one is None or one in self.texts for one in (value if isinstance(value, list | tuple) else [value]))

    @property
    def words(self) -> str:
        return " or ".join(filter(None, (", ".join(map(repr, self.texts[:-1])), repr(self.texts[-1]))))


def _words(interval: str, *, whole: bool) -> str:
    low, high = interval[1:-1].split(", ")
    bounds = []
    if low != "-inf":
        bounds.append(f"{_LOWER[interval[0]][1]} {low}")
    if high != "inf":
        bounds.append(f"{_UPPER[interval[-1]][1]} {high}")
    limits = " and ".join(bounds)
    if whole:
        return f"a whole number of {limits}" if limits else "a whole number"
    return limits or "a finite number"


def out_of_range(node: Any, path: str, domains: Mapping[str, Domain | Choice], *, others: bool = True) -> Iterator[str]:
    """Values of a configuration, or of its node in a recipe, that its table does not allow: one paragraph for each
    field.

    ``others``: also reject NaN and the infinities in fields without a row.
    """
    if node is None:
        return
    owner = f"{path}." if path else ""
    arguments = getattr(node, "__arguments__", None)
    written = arguments if isinstance(arguments, Mapping) else getattr(node, "__dict__", {})
    for name in dict.fromkeys((*domains, *(written if others else ()))):
        if name not in written and decided_elsewhere(class_of(node), name) is not None:
            continue  # a value of another part, which has a row too
        value, domain = getattr(node, name, None), domains.get(name)
        if domain is None:
            if isinstance(value, float) and not math.isfinite(value):
                yield f"{owner}{name}={value!r}: must be a finite number."
        elif not domain.holds(value):
            unless = f" {domain.unless[0].upper()}{domain.unless[1:]}." if domain.unless else ""
            limit = "finite and " if value == math.inf else ""
            numbers_of = value if isinstance(value, list | tuple) else [value]
            if any(isinstance(one, int) and one > _INT64 == getattr(domain, "most", None) for one in numbers_of):
                limit = f"at most {_INT64:,} and "
            texts = domain.texts if isinstance(domain, Choice) and len(domain.texts) > 2 else ()
            nearest = did_you_mean(str(value), texts, listed=True)
            yield f"{owner}{name}={value!r}: must be {limit}{domain.words} ({domain.why}){nearest}{unless}"


def refuse_out_of_range(values: Mapping[str, Any], path: str, domains: Mapping[str, Domain | Choice]) -> None:
    """Refuse arguments of the object at ``path`` that its table does not allow.

    Raises:
        ConfigError: the message lists all of them.
    """
    if sentences := [*out_of_range(SimpleNamespace(**values), path, domains, others=False)]:
        raise ConfigError("\n".join(sentences))
