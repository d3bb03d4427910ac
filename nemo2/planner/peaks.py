# SPDX-License-Identifier: Apache-2.0
"""The rehearsed memory of every shipped recipe on the number of H100s that it declares. Imports nothing of nemo2, so that
`nemo2 list` stays fast.

``python tools/rehearse_recipes.py --write docs/rehearsed_recipes.md`` writes `FILE` and the page.
"""

import json
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("rehearsed.json")


@cache
def rehearsed() -> dict[str, dict[str, float]]:
    """For each recipe the GiB of the fullest GPU: counted by a rehearsal (``peak``), and by `nemo2.planner.memory`
    (``formula``)."""
    return json.loads(FILE.read_text(encoding="utf-8"))
