# SPDX-License-Identifier: Apache-2.0
"""``pytest -p support.quick``: units, and one run on ranks for each room, which is marked quick. What `make quick` runs.

A unit starts no process: its test asks for no ranks, and its file for no `subprocess`. The first `CASES` cases of a test run.
Left out are tests marked slow and the folders of `LEFT_OUT`, whose files train, rehearse or build whole runs
in one process; what is left out isn't imported either.
"""

from collections import Counter
from pathlib import Path
from typing import Optional

import pytest

TESTS = Path(__file__).resolve().parents[1] / "tests"
LEFT_OUT = (
    "bench",
    "docs",
    "gpu",
    "lm_eval",
    "tools",
    "test_packaging.py",
    "nemo2/preflight/planner",
    "nemo2/preflight/rehearse",
)
CASES = 2


def pytest_ignore_collect(collection_path: Path) -> Optional[bool]:
    if not collection_path.is_relative_to(TESTS):
        return None
    if collection_path.relative_to(TESTS).as_posix().startswith(LEFT_OUT):
        return True
    if not collection_path.name.startswith("test_"):
        return None
    text = collection_path.read_text() if collection_path.is_file() else ""
    return True if "import subprocess" in text or "warm_commands" in text else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    cases: Counter[str] = Counter()
    kept, dropped = [], []
    for item in items:
        test = item.nodeid.partition("[")[0]
        cases[test] += 1
        on_ranks = "run_on_ranks" in getattr(item, "fixturenames", ())
        out = item.get_closest_marker("slow") or (on_ranks and not item.get_closest_marker("quick"))
        (dropped if out or cases[test] > CASES else kept).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=dropped)
