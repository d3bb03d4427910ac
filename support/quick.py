# SPDX-License-Identifier: Apache-2.0
"""``pytest -p support.quick``: units, and one run on ranks for each room. What `make quick` runs.

A unit starts no process: its test asks for no ranks, and its file names no `subprocess`. Left out too are tests marked slow and
the folders of `LEFT_OUT`, whose files train, rehearse or build whole runs in one process.
"""

from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1] / "tests"
LEFT_OUT = ("bench", "docs", "gpu", "tools", "test_packaging.py", "nemo2/planner", "nemo2/rehearse")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    rooms: dict[str, pytest.Item] = {}
    kept, dropped = [], []
    for item in items:
        place = item.path.relative_to(TESTS).as_posix()
        if place.startswith(LEFT_OUT) or item.get_closest_marker("slow"):
            dropped.append(item)
        elif "run_on_ranks" in getattr(item, "fixturenames", ()):
            first = rooms.setdefault(room_of(place), item)
            (kept if first is item else dropped).append(item)
        else:
            (dropped if "subprocess" in item.path.read_text() else kept).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=dropped)


def room_of(place: str) -> str:
    """``nemo2/config`` of a test file's place below tests/: its folder, or itself where it lies beside folders of rooms."""
    path = Path(place)
    return place if path.parent.as_posix() in (".", "nemo2") else "/".join(path.parts[:2])
