# SPDX-License-Identifier: Apache-2.0
"""Front doors are cheap to open, and every name they promise exists for Python, completion and type checkers."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tools import recipe_stub

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "lightning", "megatron", "nemo_run", "fiddle", "numpy", "transformers")


def run_python(code: str, cwd: Path = ROOT) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.parametrize(
    "code",
    [
        "import nemo2, nemo2.llm, nemo2.callbacks, nemo2.recipes, nemo2.config, nemo2.data",
        "import nemo2.recipes as r; [r.get(name).RECIPE.parameters for name in r.names()]",
        "import nemo2.llm as llm; dir(llm); hasattr(llm, 'no_such_name')",
    ],
)
def test_front_doors_and_listing_recipes_import_nothing_heavy(code: str, tmp_path: Path) -> None:
    loaded = run_python(f"import sys\n{code}\nprint(*(m for m in {HEAVY!r} if m in sys.modules))", tmp_path)
    assert loaded.split() == []


DOORS = [
    ".".join(("nemo2", *(part for part in stub.parent.relative_to(ROOT).parts if part != "nemo2")))
    for folder in ("nemo2", "recipes", "callbacks")
    for stub in sorted((ROOT / folder).rglob("__init__.pyi"))
    if not any(parent.is_symlink() for parent in stub.parents)
]


@pytest.mark.parametrize("package", DOORS)
def test_every_promised_name_exists_and_completion_offers_it(package: str) -> None:
    module = import_module(package)
    assert module.__all__ and set(module.__all__) <= set(dir(module))
    for name in module.__all__:
        assert getattr(module, name) is not None


def test_a_type_checker_knows_every_promised_name_and_no_other(tmp_path: Path) -> None:
    lines = [f"import {package}" for package in DOORS]
    lines += [f"{package}.{name}" for package in DOORS for name in import_module(package).__all__]
    program = tmp_path / "names.py"
    program.write_text("\n".join([*lines, "nemo2.llm.LlamaModul", "nemo2.llm.get"]) + "\n")
    rules = {"reportUnusedExpression": False, "reportMissingModuleSource": False, "extraPaths": [str(ROOT)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(rules))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    report = json.loads(done.stdout)["generalDiagnostics"]
    assert [found["range"]["start"]["line"] for found in report] == [len(lines), len(lines) + 1], done.stdout


def test_the_stub_of_the_recipes_lists_their_files() -> None:
    assert recipe_stub.STUB.read_text() == recipe_stub.text(), "run `make fmt`"


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    import nemo2

    with pytest.raises(AttributeError, match="nemo2 has no name 'MegatronStrategie'; did you mean 'MegatronStrategy'"):
        nemo2.MegatronStrategie  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("folder", ["recipes", "callbacks"])
def test_the_bare_folder_names_its_real_home(folder: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failure:
        run_python(f"import {folder}", ROOT)
    assert f"This folder is installed as `nemo2.{folder}`" in failure.value.stderr
