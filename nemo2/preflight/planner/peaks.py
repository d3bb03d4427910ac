# SPDX-License-Identifier: Apache-2.0
"""The rehearsed memory of every shipped recipe on the number of GPUs that it declares. Imports nothing heavy, so that
`nemo2 list` stays fast.

``python tools/rehearse_recipes.py --write docs/rehearsed_recipes.md`` writes `FILE` and the page.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from nemo2.preflight.rehearse.counts import Ranks

FILE = Path(__file__).with_name("rehearsed.json")


@cache
def rehearsed() -> dict[str, dict[str, Any]]:
    """For each recipe the bytes of its ``ranks`` (`Ranks`), and the ``key`` of the settings that they depend on."""
    return json.loads(FILE.read_text(encoding="utf-8"))


@cache
def rehearsed_by_key() -> dict[str, Ranks]:
    """The same bytes by their keys (`nemo2.preflight.planner.fit.key_of`)."""
    return {one["key"]: one["ranks"] for one in rehearsed().values()}
