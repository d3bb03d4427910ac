# SPDX-License-Identifier: Apache-2.0
"""``recipes/__init__.pyi`` and ``recipes/_typed.pyi``: the names of `nemo2.recipes` and their types, for type checkers and
editors, written from the recipes; and ``nemo2/models/__init__.pyi``, the front door of the families, written from their files.

``make fmt`` runs it.
"""

import subprocess
import sys
from pathlib import Path

from nemo2.models.conversion.families import families
from nemo2.models.gpt import GPTConfig, GPTModel
from tools.recipe_types import Types

FOLDER = Path(__file__).resolve().parents[1] / "recipes"
MODELS = FOLDER.parent / "nemo2" / "models" / "__init__.pyi"
_LICENSE = "# SPDX-License-Identifier: Apache-2.0\n# Written by `make fmt` from the files of this folder.\n"
_FIXED = f"""\
{_LICENSE}\
from nemo2.mcore.parallel.layout import Layout as Layout
from nemo2.recipes._assembler import PretrainRecipe as PretrainRecipe
from nemo2.recipes._find import get as get
from nemo2.recipes._find import own as own
from nemo2.recipes._shipped import names as names
"""


_STEPS = "from nemo2.models.gpt_step import gpt_data_step as gpt_data_step, gpt_forward_step as gpt_forward_step\n"


def texts() -> dict[Path, str]:
    """The stubs as ruff formats them."""
    families()  # imports them
    models = "".join(f"from {one.__module__} import {one.__name__} as {one.__name__}\n" for one in _model_classes())
    names = sorted(file.stem for file in FOLDER.glob("*.py") if not file.stem.startswith("_"))
    door = _FIXED + "".join(f"from nemo2.recipes._typed import {name} as {name}\n" for name in names)
    stubs = {"__init__.pyi": f"{door}\n__all__ = {names!r}\n", "_typed.pyi": Types().text}
    files = {FOLDER / name: stub for name, stub in stubs.items()}
    files[MODELS] = f"{_LICENSE}{models}{_STEPS}\n__all__: list[str]\n"
    return {file: _formatted(file, stub) for file, stub in files.items()}


def _model_classes() -> list[type]:
    """The public configurations and models of ``nemo2.models``."""
    found: list[type] = [GPTConfig, GPTModel]
    for one in found:
        found += [sub for sub in one.__subclasses__() if sub not in found]
    return [one for one in found if one.__module__.startswith("nemo2.models.") and not one.__name__.startswith("_")]


def _formatted(file: Path, stub: str) -> str:
    for step in (["check", "--select", "I,UP007,UP045", "--fix", "--quiet"], ["format", "--quiet"]):
        command = [sys.executable, "-m", "ruff", *step, "--stdin-filename", str(file), "-"]
        stub = subprocess.run(command, input=stub, capture_output=True, text=True, check=True).stdout
    return stub


if __name__ == "__main__":
    for file, stub in texts().items():
        file.write_text(stub)
