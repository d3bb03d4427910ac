# SPDX-License-Identifier: Apache-2.0
"""Commands that are broken into lines say what they said."""

import shlex
import subprocess

import pytest

from support.rule_examples import EXAMPLES
from tools.wrapped import COLUMNS, wrapped

PYTHON = [one for one in EXAMPLES if one.broken.in_python]
COMMANDS = {line: shlex.split(line) for one in EXAMPLES if one not in PYTHON for line in one.broken.lines()}


def test_every_command_of_the_rules_fits_and_gives_a_shell_the_same_words() -> None:
    broken = {line: wrapped(line, "") for line in COMMANDS if len(line) > COLUMNS}
    assert len(broken) > 20 and all(len(row) <= COLUMNS for rows in broken.values() for row in rows)
    script = "\n".join("printf '%s\\0' " + "\n".join(rows) + "; echo" for rows in broken.values())
    told = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
    # A value in quotes is broken inside of its parentheses, where white space has no meaning.
    words = [[word.replace("\n    ", "") for word in line.split("\0")] for line in told.split("\0\n")[:-1]]
    assert words == [COMMANDS[line] for line in broken]


@pytest.mark.parametrize("example", PYTHON, ids=lambda one: one.rule)
def test_broken_python_is_the_same_code(example) -> None:
    for line in example.broken.lines():
        rows = wrapped(line, ">>> ")
        assert all(len(row) <= COLUMNS for row in rows)
        assert " ".join(row[4:].strip() for row in rows) == line
