# SPDX-License-Identifier: Apache-2.0
"""The rehearsed memory of every shipped recipe on the number of GPUs that it declares. Imports nothing heavy, so that
`nemo2 list` stays fast.

``python tools/rehearse_recipes.py --write docs/rehearsed_recipes.md`` writes `FILE` and the page.
"""

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from nemo2.gpus import OUTSIDE_TORCH

FILE = Path(__file__).with_name("rehearsed.json")
Ranks = dict[str, dict[str, int]]
"""For each kind of rank its bytes by part."""


@cache
def rehearsed() -> dict[str, dict[str, Any]]:
    """For each recipe the bytes of its ``ranks`` (`Ranks`), and the ``key`` of the settings that they depend on."""
    return json.loads(FILE.read_text(encoding="utf-8"))


@cache
def rehearsed_by_key() -> dict[str, Ranks]:
    """The same bytes by their keys (`nemo2.planner.fit.key_of`)."""
    return {one["key"]: one["ranks"] for one in rehearsed().values()}


def parts_of(ranks: Iterable[Any]) -> Ranks:
    """The bytes of rehearsed ranks (`nemo2.rehearse.counts.RankRehearsal`) by part."""
    return {rank.kind: {name: size for name, size in rank.memory.terms().items() if size} for rank in ranks}


def peak_of(ranks: Ranks) -> int:
    """The bytes on the GPU with the most memory, including memory outside torch."""
    return max(sum(parts.values()) for parts in ranks.values()) + OUTSIDE_TORCH
