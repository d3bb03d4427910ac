# SPDX-License-Identifier: Apache-2.0
"""``recipes/__init__.pyi``, the names of `nemo2.recipes` for type checkers and editors, written from the recipes' files.

``make fmt`` runs it.
"""

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "recipes"
STUB = FOLDER / "__init__.pyi"
_FIXED = """\
# SPDX-License-Identifier: Apache-2.0
# Written by `make fmt` from the files of this folder.
from nemo2.parallel.layout import Layout as Layout
from nemo2.recipes._assembler import PretrainRecipe as PretrainRecipe
from nemo2.recipes._find import get as get
from nemo2.recipes._find import own as own
from nemo2.recipes._shipped import names as names
"""


def text() -> str:
    """The stub as ruff formats it."""
    names = sorted(file.stem for file in FOLDER.glob("*.py") if not file.stem.startswith("_"))
    stub = (
        _FIXED + "".join(f"from nemo2.recipes import {name} as {name}\n" for name in names) + f"\n__all__ = {names!r}\n"
    )
    for step in (["check", "--select", "I", "--fix", "--quiet"], ["format", "--quiet"]):
        command = [sys.executable, "-m", "ruff", *step, "--stdin-filename", str(STUB), "-"]
        stub = subprocess.run(command, input=stub, capture_output=True, text=True, check=True).stdout
    return stub


if __name__ == "__main__":
    STUB.write_text(text())
