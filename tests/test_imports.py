# SPDX-License-Identifier: Apache-2.0
"""Imports point down, front doors are cheap, and every name they promise exists."""

import ast
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tools import recipe_stub, rooms

ROOT = Path(__file__).resolve().parent.parent
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


def test_imports_lead_only_where_the_table_of_rooms_lets_them() -> None:
    assert rooms.strays() == [], "mend the import, or the table in tools/rooms.py and run `make fmt`"


def test_rooms_are_listed_from_the_lowest_up() -> None:
    order = [room.name for room in rooms.ROOMS]
    assert [(room.name, other) for room in rooms.ROOMS for other in room.leans_on or () if other not in order] == []
    upward = [(a.name, b) for a in rooms.ROOMS for b in a.leans_on or () if order.index(b) >= order.index(a.name)]
    assert upward == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert rooms.circles() == []


def test_every_circle_that_may_stay_is_still_there() -> None:
    known = {(one.importer, one.module) for one in rooms.imports()}
    assert [pair for pair in rooms.BACK if pair not in known] == []


def test_an_import_upward_and_a_circle_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    up = rooms.Import("nemo2.errors", "nemo2.gpus", 7, False)
    monkeypatch.setattr(rooms, "imports", lambda: (up, rooms.Import("nemo2.gpus", "nemo2.errors", 3, False)))
    assert rooms.strays() == ["nemo2.errors:7 imports nemo2.gpus"]
    assert rooms.circles() == [["nemo2.errors", "nemo2.gpus"]]


def test_imports_are_seen_wherever_they_stand() -> None:
    seen = {(one.importer, one.module) for one in rooms.imports()}
    assert ("nemo2", "nemo2.strategy") in seen  # a stub
    assert ("nemo2.recipes._assembler", "nemo2.strategy") in seen  # in a function, through the front door
    assert ("nemo2.recipes._find", "nemo2.recipes._own") in seen  # for types, and in a function


def test_the_page_has_the_table_of_rooms() -> None:
    assert rooms.PAGE.read_text() == rooms.page(), "run `make fmt`"


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
