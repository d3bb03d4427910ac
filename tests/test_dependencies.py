# SPDX-License-Identifier: Apache-2.0
"""Each end of a version range in pyproject.toml has its reason, and holds the versions with which the tests passed."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tools.constraints import lines, requirement

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONSTRAINTS = (ROOT / "constraints.txt").read_text()
PYTHONS = ((3, 11), (3, 12), (3, 13))
EXTRAS = ("hf", "data", "test", "site")
"""The extras that the tried environments hold."""
TEXTS = [*PROJECT["dependencies"], *(text for name in EXTRAS for text in PROJECT["optional-dependencies"][name])]
REQUIREMENTS = [Requirement(text) for text in TEXTS if not text.startswith("nemo2[")]


def tried(name: str, python: tuple[int, int]) -> Version:
    return Version(requirement(canonicalize_name(name), CONSTRAINTS, python).partition("==")[2])


@pytest.mark.parametrize("one", REQUIREMENTS, ids=str)
def test_a_range_holds_what_was_tried_on_every_python(one):
    for python in PYTHONS:
        assert one.specifier.contains(tried(one.name, python)), (python, tried(one.name, python))


@pytest.mark.parametrize("one", [Requirement(text) for text in PROJECT["dependencies"]], ids=str)
def test_a_dependency_has_a_lower_end(one):
    assert [part for part in one.specifier if part.operator == ">="]


@pytest.mark.parametrize("text", [text for text in TEXTS if "<" in text])
def test_an_upper_end_has_its_reason_beside_it(text):
    rows = (ROOT / "pyproject.toml").read_text().split("\n")
    [index] = [index for index, row in enumerate(rows) if f'"{text}"' in row]
    assert "#" in rows[index] or rows[index - 1].strip().startswith("#")


def test_the_newest_python_of_the_metadata_is_one_that_was_tried():
    classifiers = [one.rpartition(" :: ")[2] for one in PROJECT["classifiers"] if "Python :: 3." in one]
    assert classifiers == [f"{major}.{minor}" for major, minor in PYTHONS]


def test_a_stack_is_read_as_it_was_written():
    text = "\n".join(lines({"torch": "2.15.0", "rich": "13", "new": "1"}, {"torch": "2.13.0", "rich": "13"}, "3.12"))
    assert [requirement("torch", text, python) for python in PYTHONS] == [
        "torch==2.13.0",
        "torch==2.15.0",
        "torch==2.15.0",
    ]
    assert requirement("rich", text, (3, 11)) == "rich==13"
    assert requirement("absent", text, (3, 12)) == "absent"
