# SPDX-License-Identifier: Apache-2.0
"""Recipes of a user's own: found by path, by folder and by package, and none takes another down."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from nemo2 import recipes
from nemo2.base.errors import ConfigError
from nemo2.recipes import _own

FACTS = """
from nemo2.recipes import llama_tiny
RECIPE = llama_tiny.RECIPE.but(name="{name}", seq_length=256)
"""
FUNCTION = """
from nemo2.recipes import llama_tiny
def pretrain_recipe():
    recipe = llama_tiny.pretrain_recipe()
    recipe.trainer.max_steps = {steps}
    return recipe
"""


pytestmark = pytest.mark.usefixtures("no_own_recipes")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that ``$NEMO2_RECIPES`` names."""
    monkeypatch.setenv(_own.VARIABLE, str(tmp_path))
    return tmp_path


def test_facts_alone_are_a_recipe_with_all_its_functions(folder):
    (folder / "own_facts.py").write_text(FACTS.format(name="own_facts"))
    recipe = recipes.get("own_facts")
    assert recipe.RECIPE is not None and recipe.RECIPE.seq_length == 256
    assert recipe.pretrain_recipe(name="x").data.seq_length == 256
    assert recipe.model() == recipes.get("llama_tiny").model()
    assert recipe.trainer(max_steps=3).max_steps == 3


def test_a_function_alone_is_a_recipe_and_wins_over_that_of_the_facts(folder):
    (folder / "own_function.py").write_text(FUNCTION.format(steps=7))
    (folder / "own_both.py").write_text(FACTS.format(name="own_both") + FUNCTION.format(steps=8))
    assert recipes.get("own_function").RECIPE is None
    assert recipes.get("own_function").pretrain_recipe().trainer.max_steps == 7
    assert recipes.get("own_both").pretrain_recipe().trainer.max_steps == 8
    with pytest.raises(ConfigError, match=r"defines neither model\(\) nor RECIPE"):
        recipes.get("own_function").model()


def test_a_file_is_a_recipe_where_a_name_is_expected(tmp_path, monkeypatch):
    (tmp_path / "own_two.py").write_text(FACTS.format(name="first") + FUNCTION.format(steps=9) + "\nSECOND = RECIPE")
    monkeypatch.chdir(tmp_path)
    assert recipes.get("own_two.py").pretrain_recipe().trainer.max_steps == 9
    assert recipes.get(f"{tmp_path}/own_two.py:SECOND").pretrain_recipe().data.seq_length == 256
    assert recipes.get("./own_two.py:pretrain_recipe").pretrain_recipe().trainer.max_steps == 9
    with pytest.raises(ConfigError, match="own_two has no 'SECONT'; did you mean 'SECOND'"):
        recipes.get("own_two.py:SECONT")
    with pytest.raises(
        ConfigError,
        match=r"no recipe 'own_two'.*There is a file own_two.py in this folder. To use it, write ./own_two.py",
    ):
        recipes.get("own_two")


def test_a_folder_lists_its_files_but_those_with_an_underscore_and_imports_none(folder):
    for name in ("own_b", "own_a", "_helper"):
        (folder / f"{name}.py").write_text("raise SystemExit('imported')")
    found, problems = recipes.own()
    assert (list(found), problems) == (["own_a", "own_b"], [])
    assert found["own_a"].origin == str(folder / "own_a.py")


def test_names_that_are_taken_are_told_and_the_first_stays(folder, tmp_path_factory, monkeypatch):
    second = tmp_path_factory.mktemp("second")
    (folder / "llama3_8b.py").write_text(FACTS.format(name="llama3_8b"))
    for place, steps in ((folder, 1), (second, 2)):
        (place / "own_same.py").write_text(FUNCTION.format(steps=steps))
    monkeypatch.setenv(_own.VARIABLE, f"{folder}{os.pathsep}{second}{os.pathsep}{folder}/nowhere")
    found, problems = recipes.own()
    assert list(found) == ["own_same"]
    assert recipes.get("own_same").pretrain_recipe().trainer.max_steps == 1
    assert recipes.get("llama3_8b").RECIPE.seq_length == 8192
    told = "\n".join(problems)
    assert "'llama3_8b' is the name of a shipped recipe" in told and "'own_same' is already the name of" in told
    assert f"{folder}/nowhere, which does not exist" in told
    # Both can still be had by their paths, at once.
    assert recipes.get(f"{second}/own_same.py").pretrain_recipe().trainer.max_steps == 2
    assert recipes.get(f"{folder}/own_same.py").pretrain_recipe().trainer.max_steps == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import no_such_module", r"own_broken.py cannot be imported: ModuleNotFoundError: .*no_such_module.*own_broken.py:1"),
        ("def f(:\n", r"SyntaxError: invalid syntax .*\(line 1\)"),
        ("raise SystemExit(3)", "cannot be imported: SystemExit: 3"),
        ("x = 3", "is not a recipe: it has neither RECIPE"),
        ("RECIPE = 3", "RECIPE is a int, but must be a PretrainRecipe"),
        (
            "from nemo2.recipes import llama_tiny\nRECIPE = llama_tiny.RECIPE.but(seq_len=3)",
            r"did you mean 'seq_length'.*\(own_broken.py:2\)",
        ),
        ("from nemo2.recipes import llama_tiny\n\nRECIPE = llama_tiny.RECIPE.but(nodes=0)", r"\(own_broken.py:3\)"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_told_with_its_name_and_line(folder, text, words):
    (folder / "own_broken.py").write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        recipes.get("own_broken")
    assert "own_broken" in str(caught.value)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("    return 3", r"pretrain_recipe\(\) returned int, but a recipe is a nemo2.Partial"),
        ("    return {}['seq']", r"pretrain_recipe\(\) failed with KeyError: 'seq' \(own_failing.py:2\)"),
        (
            "    from nemo2.recipes import llama_tiny\n    llama_tiny.pretrain_recipe().trainer.max_step = 3",
            r"own_failing.py:3: Trainer has no parameter 'max_step'",
        ),
    ],
)
def test_a_function_that_fails_is_told_with_its_line(folder, body, words):
    (folder / "own_failing.py").write_text(f"def pretrain_recipe():\n{body}\n")
    with pytest.raises(ConfigError, match=words):
        recipes.get("own_failing").pretrain_recipe()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("own-recipe.py", "Give the file the name of a Python module, for example own_recipe.py"),
        ("json.py", "would import the installed module 'json'"),
        ("missing.py", "missing.py: this file does not exist"),
    ],
)
def test_a_file_must_be_there_under_a_name_that_ranks_can_import(tmp_path, name, words):
    if name != "missing.py":
        (tmp_path / name).write_text(FUNCTION.format(steps=1))
    with pytest.raises(ConfigError, match=words):
        recipes.get(str(tmp_path / name))


def test_what_a_file_defines_can_be_imported_by_the_processes_of_the_run(tmp_path):
    (tmp_path / "own_sibling.py").write_text("STEPS = 5")
    (tmp_path / "own_class.py").write_text(
        "from own_sibling import STEPS\nfrom nemo2.config import configurable\n@configurable\nclass Mine:\n"
        "    def __init__(self, word: str = 'a'):\n        self.word = word\n"
        + FUNCTION.format(steps=5).replace("return", "recipe.trainer.callbacks.append(Mine('b'))\n    return")
    )
    from nemo2.config import check_serialisable

    recipe = recipes.get(str(tmp_path / "own_class.py")).pretrain_recipe()
    check_serialisable(recipe)
    seen = subprocess.run(
        [sys.executable, "-c", "import own_class; print(own_class.Mine('c').word)"],
        capture_output=True, text=True, cwd="/",
    )  # fmt: skip
    assert seen.stdout == "c\n", seen.stderr


class Distribution(metadata.Distribution):
    """An installed package that announces recipes."""

    def read_text(self, filename: str) -> str | None:
        points = (
            "[nemo2.recipes]\nown_module = own_package.mine\nown_one = own_package.mine:ONE\nllama3_8b = own_package\n"
        )
        return {"METADATA": "Name: own-package\nVersion: 1", "entry_points.txt": points}.get(filename)

    def locate_file(self, path: Any) -> Path:
        return Path(path)


def test_an_installed_package_announces_recipes(tmp_path, monkeypatch):
    package = tmp_path / "own_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "mine.py").write_text(FACTS.format(name="x") + "\nONE = RECIPE.but(seq_length=512)")
    monkeypatch.syspath_prepend(str(tmp_path))
    points = Distribution().entry_points
    for point in points:
        vars(point).update(dist=Distribution())
    installed = metadata.entry_points  # the imports of torch ask for those of other groups

    def announced(**selected: Any) -> Any:
        return [point for point in points if point.group == selected.get("group")] or installed(**selected)

    monkeypatch.setattr(metadata, "entry_points", announced)
    found, problems = recipes.own()
    assert {name: source.origin for name, source in found.items()} == {
        "own_module": "own-package",
        "own_one": "own-package",
    }
    assert "own_package" not in sys.modules and "'llama3_8b' is the name of a shipped recipe" in problems[0]
    assert recipes.get("own_module").pretrain_recipe().data.seq_length == 256
    assert recipes.get("own_one").pretrain_recipe().data.seq_length == 512
    assert _own.trusted_modules() == ["own_package.mine", "own_package"]


def test_listing_own_facts_loads_neither_torch_nor_nemo_run(folder):
    (folder / "own_facts.py").write_text(FACTS.format(name="own_facts"))
    code = (
        "import sys; from nemo2.cli import main; code = main(['list', '--own', '--json']);"
        "sys.exit(code or any(m in sys.modules for m in ('torch', 'nemo_run', 'lightning', 'fiddle')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and '"own_facts"' in done.stdout, done.stderr
