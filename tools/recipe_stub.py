# SPDX-License-Identifier: Apache-2.0
"""What is written from the code; `make fmt` runs it.

- ``recipes/__init__.pyi`` and ``recipes/_typed.pyi``: the names of `nemo2.recipes` and their types.
- ``nemo2/models/__init__.pyi``: the front door of the families.
- ``tests/nemo2/config/saved_names.txt``: the names that saved recipes may hold.
"""

import ast
import subprocess
import sys
from pathlib import Path

from nemo2.models.conversion.families import families
from nemo2.models.gpt import GPTConfig, GPTModel
from tools.recipe_types import Types

FOLDER = Path(__file__).resolve().parents[1] / "recipes"
MODELS = FOLDER.parent / "nemo2" / "models" / "__init__.pyi"
SAVED_NAMES = FOLDER.parent / "tests" / "nemo2" / "config" / "saved_names.txt"
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
    """The stubs as ruff formats them, and the list of names."""
    families()  # imports them
    models = "".join(f"from {one.__module__} import {one.__name__} as {one.__name__}\n" for one in _model_classes())
    names = sorted(file.stem for file in FOLDER.glob("*.py") if not file.stem.startswith("_"))
    door = _FIXED + "".join(f"from nemo2.recipes._typed import {name} as {name}\n" for name in names)
    stubs = {"__init__.pyi": f"{door}\n__all__ = {names!r}\n", "_typed.pyi": Types().text}
    files = {FOLDER / name: stub for name, stub in stubs.items()}
    files[MODELS] = f"{_LICENSE}{models}{_STEPS}\n__all__: list[str]\n"
    stubs = {file: _formatted(file, stub) for file, stub in files.items()}
    saved = sorted({*SAVED_NAMES.read_text().split(), *configurable_names()})  # names are added, never removed
    return {**stubs, SAVED_NAMES: "\n".join(saved) + "\n"}


def configurable_names() -> set[str]:
    """``module:name`` of every class and function of the sources that a recipe may hold as a config."""
    names = set()
    for folder in ("nemo2", "callbacks", "recipes"):
        for file in (FOLDER.parent / folder).rglob("*.py"):
            parts = file.relative_to(FOLDER.parent).with_suffix("").parts
            module = ".".join(part for part in parts if part != "__init__")
            module = module if folder == "nemo2" else f"nemo2.{module}"
            for node in ast.parse(file.read_text()).body:
                decorators = getattr(node, "decorator_list", [])
                is_size = bool(getattr(node, "keywords", None))  # class Qwen3Config8B(Qwen3Config, num_layers=36, ...)
                if is_size or any("configurable" in ast.unparse(one).split("(")[0] for one in decorators):
                    names.add(f"{module}:{node.name}")  # pyright: ignore[reportAttributeAccessIssue]
    return names


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
