# SPDX-License-Identifier: Apache-2.0
"""The contents of a wheel built from this tree, which stands on its own."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the tree, so that no build folder is left in the tree or taken from it."""
    directory = tmp_path_factory.mktemp("wheel")
    source = directory / "source"
    for folder in ("nemo2", "recipes", "callbacks"):
        # With its links as links: what a clone has.
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source / file)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*command, "--wheel-dir", str(directory), str(source)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [file] = directory.glob("*.whl")
    return file


def test_a_wheel_holds_every_module_once_and_under_nemo2(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert len(names) == len(set(names))
    expected = {"nemo2/py.typed"}
    for folder, package in (("nemo2", "nemo2"), ("recipes", "nemo2/recipes"), ("callbacks", "nemo2/callbacks")):
        expected |= {f"{package}/{file.relative_to(ROOT / folder)}" for file in sources(ROOT / folder)}
    held = {name for name in names if ".dist-info/" not in name}
    assert held == expected


def test_the_metadata_say_what_the_project_says(wheel):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with zipfile.ZipFile(wheel) as archive:
        [prefix] = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        metadata = message_from_string(archive.read(f"{prefix}/METADATA").decode())
        entry_points = archive.read(f"{prefix}/entry_points.txt").decode()
        assert any(name.startswith(prefix) and name.endswith("LICENSE") for name in archive.namelist())
    assert (metadata["Name"], metadata["Version"]) == (project["name"], project["version"])
    required = [item for item in metadata.get_all("Requires-Dist", []) if "extra ==" not in item]
    assert len(required) == len(project["dependencies"])
    assert "nemo2 = nemo2.cli:script" in entry_points and "llm = nemo2.cli.nemo_run" in entry_points


def test_an_installed_wheel_lists_its_recipes_without_any_other_package(wheel, tmp_path):
    target = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*command, "--target", str(target), str(wheel)], check=True, timeout=240)
    program = (
        "import nemo2, nemo2.recipes as r; print(nemo2.__file__); print(*r.names()); print(r.llama3_8b.RECIPE.name)"
    )
    # -S: neither site-packages nor the editable install of this tree are there.
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        env=environment(PYTHONPATH=str(target)),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    where, names, one = done.stdout.splitlines()
    assert Path(where).is_relative_to(target)
    assert {"llama3_8b", "llama_tiny"} <= set(names.split()) and one == "llama3_8b"


def test_an_editable_install_is_a_path_that_type_checkers_follow(wheel, tmp_path):
    source = wheel.parent / "source"
    build = f"from setuptools.build_meta import build_editable; build_editable({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    [file] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        [path] = [name for name in archive.namelist() if ".dist-info/" not in name]
        assert path.endswith(".pth") and archive.read(path).decode().strip() == str(source)


@pytest.mark.parametrize("folder", ["recipes", "callbacks"])
def test_a_bare_import_from_a_checkout_fails_with_the_right_import(folder):
    done = subprocess.run(
        [sys.executable, "-c", f"import {folder}"],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    [sentence] = [line for line in done.stderr.splitlines() if line.startswith("ImportError")]
    assert f"This folder is installed as `nemo2.{folder}`" in sentence and f"from nemo2.{folder} import" in sentence


def sources(folder: Path) -> list[Path]:
    """Python files below `folder`, their stubs, and what they read, links to other folders aside."""
    files = [file for ending in ("py", "pyi", "json", "css", "html", "j2") for file in folder.rglob(f"*.{ending}")]
    return [file for file in files if not any(parent.is_symlink() for parent in file.parents)]


def environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {**kept, "PYTHONDONTWRITEBYTECODE": "1", **variables}
