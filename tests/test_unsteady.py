# SPDX-License-Identifier: Apache-2.0
"""Runs of pytest with `support.unsteady` on tests that fail once, always, or too often."""

import datetime
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ONCE = """
from pathlib import Path
def test_once():
    marker = Path(__file__).with_name("marker")
    if not marker.exists():
        marker.touch()
        raise AssertionError("the first time")
"""
ALWAYS = "def test_always():\n    raise AssertionError('each time')\n"
PASSES = "def test_passes():\n    pass\n"


def run(folder: Path, files: dict[str, str], *options: str, known: dict[str, str] | None = None) -> tuple[int, str]:
    (folder / "tests").mkdir()
    (folder / "tests" / "unsteady.json").write_text(json.dumps(known or {}))
    for name, text in files.items():
        (folder / "tests" / name).write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "support.unsteady", *options]
    done = subprocess.run(command, cwd=folder, env=_environment(), capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return kept | {"PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one process", "workers"])
def test_what_passes_alone_does_not_fail_the_run_and_is_named(tmp_path, workers):
    fixture = ONCE.replace("def test_once():", "import pytest\n@pytest.fixture\ndef value():")
    uses = f"{fixture.replace('marker', 'other')}def test_uses_it(value):\n    pass\n"
    code, output = run(tmp_path, {"test_once.py": ONCE, "test_uses.py": uses, "test_passes.py": PASSES}, *workers)
    assert code == 0 and "1 passed" in output, output
    for test in ("test_once.py::test_once", "test_uses.py::test_uses_it"):
        assert f"UNSTEADY tests/{test}: unsteady/" in output
    assert ["the first time" in file.read_text() for file in (tmp_path / "unsteady").iterdir()] == [True] * 2


def test_what_fails_again_or_has_long_been_known_fails_the_run(tmp_path):
    days = {name: datetime.date.today() - datetime.timedelta(days=ago) for name, ago in (("new", 6), ("old", 8))}
    files = {f"test_{name}.py": ONCE.replace("marker", name) for name in ("once", *days)} | {"test_always.py": ALWAYS}
    known = {f"tests/test_{name}.py::test_once": day.isoformat() for name, day in days.items()}
    code, output = run(tmp_path, files, known=known)
    assert code == 1 and "2 failed" in output
    for word, tests in (("UNSTEADY", ["new", "once"]), ("FAILED", ["always", "old"])):
        assert sorted(re.findall(rf"{word} tests/test_(\w+)", output)) == tests


def test_many_failures_are_not_run_again(tmp_path):
    files = {f"test_{number}.py": ONCE.replace("marker", f"marker{number}") for number in range(11)}
    code, output = run(tmp_path, files)
    assert code == 1 and "11 failed" in output and "UNSTEADY" not in output


def test_a_file_that_cannot_be_imported_fails_the_run(tmp_path):
    code, output = run(tmp_path, {"test_once.py": ONCE, "test_broken.py": "import nothing_of_this_name\n"})
    assert code != 0 and "UNSTEADY" not in output
