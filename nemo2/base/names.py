# SPDX-License-Identifier: Apache-2.0
"""Names that people type: suggestions for typing errors, and which names are safe for a directory."""

import difflib
import re
from collections.abc import Iterable
from typing import Any, get_args

from nemo2.base.errors import ConfigError

MAX_NAME_BYTES = 128
"""Checkpoint directories append the step, the loss and the consumed samples to a name, and file systems stop at 255."""

ABBREVIATIONS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vp": "virtual_pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "sp": "sequence_parallel",
    "mbs": "micro_batch_size",
    "gbs": "global_batch_size",
    "rank": "dim",
    "lora_rank": "dim",
    "lora_alpha": "alpha",
}
"""What everybody calls these settings. Their letters are also those of other names."""

_SAFE = re.compile(r"\w[\w.=+@,-]*\Z")
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_RUN_OF_UNSAFE = re.compile(r"[^\w.=+@,-]+")


def nearest(name: str, known: Iterable[str], *, limit: int = 3) -> list[str]:
    """The known names that `name` is most likely a misspelling of, best first; empty where nothing is close.

    Besides letters that differ, it finds names that only add or lack a part (`sequence_parallelism` for
    `sequence_parallel`, `lr` for `max_lr`), which edit distance alone ranks below unrelated names of equal length, and
    abbreviations (`learning_rate` for `lr`, `gbs` for `global_batch_size`).
    """
    folded = name.lower().replace("-", "_")
    known = list(dict.fromkeys(known))
    if (full := ABBREVIATIONS.get(folded)) in known:
        return [full]
    parts = set(folded.split("_"))
    scored = []
    for candidate in known:
        other = candidate.lower().replace("-", "_")
        matcher = difflib.SequenceMatcher(None, folded, other)
        # Most names are far apart, and an upper bound that costs a third says so.
        score = matcher.ratio() if matcher.quick_ratio() >= 0.6 else 0.0
        if min(len(folded), len(other)) >= 2 and (parts <= set(other.split("_")) or set(other.split("_")) <= parts):
            score = max(score, 0.75)
        elif min(len(folded), len(other)) >= 4 and (folded in other or other in folded):
            score = max(score, 0.7)
        elif "_" in folded + other and (folded == _initials(other) or other == _initials(folded)):
            score = max(score, 0.75)
        if score >= 0.6:
            scored.append((-score, candidate))
    return [candidate for _, candidate in sorted(scored)[:limit]]


def visible(text: str) -> str:
    """``text`` with control characters written out (``\\x1b``), except line breaks and tabs. Text of files that others
    wrote could otherwise move the cursor, change the terminal's title or hide words."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def _initials(name: str) -> str:
    return "".join(part[:1] for part in name.split("_"))


def a(name: str) -> str:
    """The name of a class after its article: ``"a Trainer"``, ``"an OptimizerModule"``."""
    return f"{'an' if name[:1] in 'AEIO' else 'a'} {name}"


def shortened(text: str, most: int = 80) -> str:
    """The text for a sentence: a longer one ends in dots."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def sentence(text: str) -> str:
    """The text with the dot of a sentence, if it has no end of its own."""
    return text if text.endswith((".", "!", "?")) else f"{text}."


def listed(names: Iterable[str], most: int = 20, *, separator: str = ", ") -> str:
    """The names for a sentence: of more than ``most`` the first ones, and the number of the others."""
    names = list(names)
    end = f"{'' if separator == ', ' else ';'} and {len(names) - most} more" if len(names) > most else ""
    return f"{separator.join(names[:most])}{end}"


def did_you_mean(name: str, known: Iterable[str], *, listed: bool = False) -> str:
    """The end of a sentence: `"; did you mean 'a' or 'b'?"`, or the known names where none is close, or just `"."`.

    ``listed``: the sentence itself lists the known names.
    """
    known = list(dict.fromkeys(known))
    close = nearest(name, known)
    if close:
        quoted = [repr(candidate) for candidate in close]
        named = quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}"
        return f"; did you mean {named}?"
    if known and len(known) <= 12 and not listed:
        return f"; known names: {', '.join(known)}."
    return "."


def check_choice(name: str, value: Any, choices: Any) -> None:
    """Check the setting ``name``, whose type is the Literal ``choices``.

    Raises:
        ConfigError: ``value`` is none of them.
    """
    *others, last = get_args(choices)
    if value not in (*others, last):
        raise ConfigError(f"{name}={value!r}: must be {', '.join(map(repr, others))} or {last!r}.")


def safe_name(name: str, *, field: str = "name") -> str:
    """`name` itself, if it can be one path component on any file system and in any command line.

    Allowed are letters, digits and ``_ . = + @ , -``, a letter, digit or underscore first, at most `MAX_NAME_BYTES`
    bytes: no separators, no ``..``, nothing a shell or an option parser would read differently.

    Raises:
        ConfigError: with a name that would do, where one can be made.
    """
    if not isinstance(name, str):
        raise ConfigError(f"{field}={name!r} must be a string, not {type(name).__name__}.")
    if _SAFE.match(name) and len(name.encode()) <= MAX_NAME_BYTES:
        return name
    shown = repr(name) if len(name) <= 80 else f"{name[:60]!r}... ({len(name)} characters)"
    suggestion = _RUN_OF_UNSAFE.sub("_", name).lstrip(".=+@,-_").rstrip("_")
    suggestion = suggestion.encode()[:MAX_NAME_BYTES].decode(errors="ignore")
    fix = f", for example {suggestion!r}" if suggestion else ""
    raise ConfigError(
        f"{field}={shown} is not a valid directory name. Use at most {MAX_NAME_BYTES} bytes of letters, digits and _ "
        f". = + @ , - that start with a letter or digit{fix}."
    )
