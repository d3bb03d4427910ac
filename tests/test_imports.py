# SPDX-License-Identifier: Apache-2.0
"""Imports point one way, front doors are cheap, and every name they promise exists."""

import ast
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tools import recipe_stub

ROOT = Path(__file__).resolve().parent.parent
# A package may import from itself and from those after it.
ORDER = ["nemo2.recipes", "nemo2.callbacks", "nemo2"]
# The front doors name recipes and callbacks, lazily; the command line and nemo-run's registry look recipes up by name.
FRONT_DOORS = (
    "nemo2/__init__.py",
    "nemo2/llm/__init__.py",
    "nemo2/cli/nemo_run.py",
    "nemo2/cli",
)
HEAVY = ("torch", "lightning", "megatron", "nemo_run", "fiddle", "numpy", "transformers")


def source_files() -> list[Path]:
    folders = (ROOT / "recipes", ROOT / "callbacks", ROOT / "nemo2")
    links = (ROOT / "nemo2" / "recipes", ROOT / "nemo2" / "callbacks")
    files = [file for folder in folders for file in folder.rglob("*.py")]
    return [file for file in files if not any(link in file.parents for link in links)]


def imported_by(file: Path) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file.relative_to(ROOT)}:{node.lineno} is a relative import"
            modules.add(node.module or "")
            modules.update(f"{node.module}.{alias.name}" for alias in node.names)
    return modules


def package_of(module: str) -> str | None:
    return next((package for package in ORDER if module == package or module.startswith(f"{package}.")), None)


def test_imports_point_from_recipes_over_callbacks_to_nemo2() -> None:
    wrong = []
    for file in source_files():
        relative = file.relative_to(ROOT)
        own = f"nemo2.{relative.parts[0]}" if relative.parts[0] != "nemo2" else "nemo2"
        if str(relative).startswith(FRONT_DOORS):
            continue
        for module in imported_by(file):
            package = package_of(module)
            if package is not None and ORDER.index(package) < ORDER.index(own):
                wrong.append(f"{relative} imports {module}")
    assert wrong == []


def test_nobody_imports_the_folders_by_their_bare_names() -> None:
    bare = [
        f"{file.relative_to(ROOT)} imports {module}"
        for file in source_files()
        for module in imported_by(file)
        if module.split(".")[0] in ("recipes", "callbacks", "tests")
    ]
    assert bare == []


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


def test_every_file_starts_with_its_licence_and_says_what_it_is_for() -> None:
    for file in source_files():
        text = file.read_text()
        assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n"), file
        assert ast.get_docstring(ast.parse(text)), file
