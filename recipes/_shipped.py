# SPDX-License-Identifier: Apache-2.0
"""The recipes of this package, one file each."""

from pathlib import Path

_RECIPES = sorted(file.stem for file in Path(__file__).parent.glob("*.py") if not file.stem.startswith("_"))


def names() -> list[str]:
    """Every recipe of this package by name, sorted."""
    return list(_RECIPES)
