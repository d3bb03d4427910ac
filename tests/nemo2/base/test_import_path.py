# SPDX-License-Identifier: Apache-2.0
"""Imports of a rank: an installed package and not the file of its name in the working directory; the user's own modules."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nemo2.base.import_path import OWN_FOLDERS, add_own_folder
from nemo2.config import Partial
from nemo2.launch import launch
from nemo2.launch.local import rank_variables

SHOW = "import yaml, random, own_module; print(yaml.__file__, random.__file__, own_module.__file__, sep='\\n')"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A working directory with two files that have the names of others, and one of its own."""
    for name in ("yaml", "random", "own_module"):
        (tmp_path / f"{name}.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def imported(environment: dict[str, str], code: str = SHOW) -> list[Path]:
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return [Path(line).parent for line in done.stdout.split()]


def test_installed_modules_come_first_and_the_working_directory_is_looked_at_all_the_same(folder, tmp_path):
    before = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    assert imported(before) == [folder] * 3, "the test's trap is none"
    yaml, random, own = imported({**before, **rank_variables(ranks=1, staging=tmp_path / "staging", requested={})})
    assert folder not in (yaml, random) and own == folder


def test_what_the_user_put_on_the_path_stays_in_front(folder, tmp_path):
    variables = rank_variables(ranks=1, staging=tmp_path / "staging", requested={"PYTHONPATH": str(folder)})
    assert imported({**os.environ, **variables}) == [folder] * 3


def test_the_machines_own_sitecustomize_still_runs(folder, tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import os; os.environ['MACHINE'] = 'ran'")
    variables = rank_variables(ranks=1, staging=tmp_path / "staging", requested={"PYTHONPATH": str(tmp_path / "site")})
    code = "import os, sys; print(os.environ['MACHINE']); print('staging' in str(sys.path))"
    assert imported({**os.environ, **variables}, code) == [Path("."), Path(".")]
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **variables}, capture_output=True, text=True)
    assert (done.stdout.split(), done.stderr) == (["ran", "False"], "")


@pytest.mark.parametrize(("words", "own"), [(["./scripts/run.py"], True), (["-m", "scripts.run"], False)])
def test_the_folder_of_a_script_is_the_users_and_that_of_a_module_is_not(tmp_path, monkeypatch, words, own):
    """``python -m nemo2`` would otherwise let ranks import what lies in nemo2's folder by its bare name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "run.py").write_text(
        "from nemo2.base.import_path import own_folders; print(*own_folders())"
    )
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])])
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        OWN_FOLDERS: "",
    }  # another test of this process may have added some
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ([str(tmp_path / "scripts")] if own else []) + [str(tmp_path)]


def test_folders_of_recipes_given_by_path_go_behind_what_is_installed(folder, tmp_path, monkeypatch):
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    (recipes / "yaml.py").write_text("")
    (recipes / "in_recipes.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    monkeypatch.delenv(OWN_FOLDERS, raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    add_own_folder(recipes)
    add_own_folder(recipes)
    variables = rank_variables(ranks=1, staging=tmp_path / "staging", requested={})
    assert str(recipes) not in variables["PYTHONPATH"].split(os.pathsep)
    code = "import yaml, in_recipes; print(yaml.__file__, in_recipes.__file__, sep='\\n')"
    yaml, own = imported({**os.environ, **variables}, code)
    assert (yaml == recipes, own) == (False, recipes)
    monkeypatch.delenv(OWN_FOLDERS)


TASK = """
import pathlib

def work(file):
    import own_module, random, yaml
    pathlib.Path(file).write_text(f"{yaml.__file__} {random.__file__} {own_module.__file__}")
"""


def test_a_launched_rank_finds_the_users_modules_and_no_file_in_place_of_a_package(folder, tmp_path, monkeypatch):
    (folder / "own_task.py").write_text(TASK)
    monkeypatch.setenv("NEMORUN_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("nemo_run.config._NEMORUN_HOME", str(tmp_path / "home"))  # read once, on import
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    import own_task  # pyright: ignore[reportMissingImports]

    launch(Partial(own_task.work, file=str(tmp_path / "told")), devices=1, name="paths", check=False)
    yaml, random, own = (Path(word).parent for word in (tmp_path / "told").read_text().split())
    assert folder not in (yaml, random) and own == folder
