# SPDX-License-Identifier: Apache-2.0
"""``recipes/__init__.pyi`` and ``recipes/_typed.pyi``: the names of `nemo2.recipes` and their types, for type checkers and
editors, written from the recipes.

``make fmt`` runs it.
"""

import subprocess
import sys
from pathlib import Path

from tools.recipe_types import Types

FOLDER = Path(__file__).resolve().parents[1] / "recipes"
_FIXED = """\
# SPDX-License-Identifier: Apache-2.0
# Written by `make fmt` from the files of this folder.
from nemo2.parallel.layout import Layout as Layout
from nemo2.recipes._assembler import PretrainRecipe as PretrainRecipe
from nemo2.recipes._find import get as get
from nemo2.recipes._find import own as own
from nemo2.recipes._shipped import names as names
"""


def texts() -> dict[Path, str]:
    """The stubs as ruff formats them."""
    names = sorted(file.stem for file in FOLDER.glob("*.py") if not file.stem.startswith("_"))
    door = _FIXED + "".join(f"from nemo2.recipes._typed import {name} as {name}\n" for name in names)
    stubs = {"__init__.pyi": f"{door}\n__all__ = {names!r}\n", "_typed.pyi": Types().text}
    return {FOLDER / name: _formatted(FOLDER / name, stub) for name, stub in stubs.items()}


def _formatted(file: Path, stub: str) -> str:
    for step in (["check", "--select", "I,UP007,UP045", "--fix", "--quiet"], ["format", "--quiet"]):
        command = [sys.executable, "-m", "ruff", *step, "--stdin-filename", str(file), "-"]
        stub = subprocess.run(command, input=stub, capture_output=True, text=True, check=True).stdout
    return stub


if __name__ == "__main__":
    for file, stub in texts().items():
        file.write_text(stub)
