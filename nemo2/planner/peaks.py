# SPDX-License-Identifier: Apache-2.0
"""The rehearsed memory of every shipped recipe, on H100s as many as it declares. Imports nothing, so that listing stays quick.

``python tools/rehearse_recipes.py --write docs/rehearsed_recipes.md`` writes it, beside its page.
"""

import json
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("rehearsed.json")


@cache
def rehearsed() -> dict[str, dict[str, float]]:
    """GiB of the fullest GPU by recipe: by rehearsal (``peak``) and by ``formula`` (`nemo2.planner.memory`)."""
    return json.loads(FILE.read_text(encoding="utf-8"))
