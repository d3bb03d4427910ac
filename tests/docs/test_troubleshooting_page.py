# SPDX-License-Identifier: Apache-2.0
"""Each message on docs/troubleshooting.md that is said to be nemo2's is in its source."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"


def messages() -> list[str]:
    """The messages of nemo2 in the first column of the tables."""
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [message for row in rows if row[1] == "nemo2" for message in re.findall("`(.+?)`", row[0])]


@pytest.fixture(scope="module")
def literals() -> list[str]:
    """The strings of the source, with the parts of one string joined as Python joins them."""
    files = [file for folder in ("nemo2", "callbacks") for file in (ROOT / folder).rglob("*.py")]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def test_there_is_a_message_of_nemo2_in_every_section():
    sections = PAGE.read_text().split("\n## ")[1:]
    assert all("| nemo2 |" in section for section in sections) and len(messages()) > len(sections)


@pytest.mark.parametrize("message", messages())
def test_a_message_of_nemo2_is_in_its_source(message, literals):
    for part in filter(None, (part.strip() for part in message.split("..."))):
        assert any(part in literal for literal in literals), part
