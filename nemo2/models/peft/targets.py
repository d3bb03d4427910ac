# SPDX-License-Identifier: Apache-2.0
"""Selects, by name, the modules that a PEFT method applies to.

A pattern is a module's own name (``linear_qkv``), or its full name with wildcards and ranges of layers:
``*.layers.0.*.linear_qkv``, ``*.layers.0-15.*.linear_fc?``, ``decoder.layers.{0,4,8}.mlp.linear_fc1``. Layers are
numbered over the whole model, from 0. A pattern takes all experts of a layer or none, with or without their part of the name
(``*.experts.linear_fc1``, ``*.local_experts.*.linear_fc1``).
"""

import functools
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Optional

from nemo2.base.errors import ConfigError
from nemo2.base.names import did_you_mean

_RANGE = re.compile(r"(?<=\.)(\d+)-(\d+)(?=\.|$)")
_EXPERT = re.compile(r"(?<=\.)local_experts\.\d+\.")
_OF_EXPERTS = re.compile(r"(\.experts)\.([^.]+)$")
_CHOICE = re.compile(r"\\\{([^{}]*)\\\}")


@dataclass
class ModuleMatcher:
    """Select modules by name.

    Args:
        target_modules: Patterns. Empty: all linear layers that ``exclude_modules`` doesn't match.
        exclude_modules: Patterns of modules to exclude.
    """

    target_modules: list[str] = field(default_factory=list)
    exclude_modules: list[str] = field(default_factory=list)

    def match(self, name: str, prefix: str = "") -> Optional[str]:
        """The first pattern that matches the module ``name`` below ``prefix``. None: the module isn't selected."""
        full = f"{prefix}.{name}" if prefix else name
        if any(takes(pattern, full) for pattern in self.exclude_modules):
            return None
        if not self.target_modules:
            return "*"
        return next((pattern for pattern in self.target_modules if takes(pattern, full)), None)


def takes(pattern: str, full_name: str) -> bool:
    """Whether a pattern matches a module's full name."""
    if pattern == full_name.rpartition(".")[2]:
        return True
    # Checkpoints stack the experts of a layer, so all of them have adapters or none. Only a wildcard meets their numbers.
    name = _EXPERT.sub("", full_name)
    return any(_compiled(pattern).fullmatch(one) for one in (name, _OF_EXPERTS.sub(r"\1.local_experts.#.\2", name)))


def takes_all_of(pattern: str, full_name: str) -> bool:
    """Whether a pattern matches this full name or that of a parent module."""
    parts = full_name.split(".")
    return any(takes(pattern, ".".join(parts[:count])) for count in range(1, len(parts) + 1))


def refuse_unmet(
    patterns: Collection[str], names: Collection[str], *, each: bool, field: str = "target_modules"
) -> None:
    """Check that patterns match linear layers of the model.

    Args:
        names: the full names of all linear layers of the model.
        each: every pattern must match a layer. False: one pattern is enough.
        field: the setting that holds the patterns, for errors.

    Raises:
        ConfigError: a pattern matches no layer.
    """
    unmet = [pattern for pattern in patterns if not any(takes(pattern, name) for name in names)]
    if not unmet or (not each and len(unmet) < len(patterns)):
        return
    known = sorted({name.rpartition(".")[2] for name in names})
    hint = did_you_mean(unmet[0], known, listed=True)
    raise ConfigError(
        f"peft.{field}: {unmet[0]!r} matches no linear layer of this model{hint} Its linear layers "
        f"are {', '.join(known)}. A pattern of full names may have wildcards and ranges of layers, such as "
        f"*.layers.0-15.*.{known[-1]}."
    )


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    text = re.escape(_RANGE.sub(_all_of_range, pattern))
    text = _CHOICE.sub(lambda match: f"(?:{match[1].replace(',', '|')})", text)
    return re.compile(text.replace(r"\*", ".*").replace(r"\?", "."))


def _all_of_range(match: re.Match[str]) -> str:
    first, last = int(match[1]), int(match[2])
    if last < first:
        raise ConfigError(
            f"A pattern of peft has the range of layers {match[0]}, which ends before it begins: write {last}-{first}."
        )
    return f"{{{','.join(map(str, range(first, last + 1)))}}}"
