# SPDX-License-Identifier: Apache-2.0
"""Commands whose output goes to a full disk, to a reader that leaves, or nowhere; run by a shell, as users do."""

import subprocess
import sys

import pytest

COMMAND = f"{sys.executable} -m nemo2"


def shell(line: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("command", ["list", "list --json", "--help"])
def test_a_full_disk_is_told_in_a_sentence(command):
    done = shell(f"{COMMAND} {command} > /dev/full")
    assert (done.returncode, done.stderr) == (1, "error: can't write the output: No space left on device.\n")


def test_a_reader_that_leaves_is_no_error():
    done = shell(f"{COMMAND} list --json | head -c 1; exit ${{PIPESTATUS[0]}}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "[", "")


def test_a_command_without_standard_streams_gets_them_and_no_file_takes_their_numbers():
    """torchx asks `sys.stdout.closed` where it is imported, and descriptor 1 would be the next file's that is opened."""
    program = "import os, sys; from nemo2.cli.streams import open_missing; open_missing(); "
    program += "print('lost'); assert not sys.stdout.closed; assert os.open('/dev/null', os.O_RDONLY) > 2"
    assert shell(f'{sys.executable} -c "{program}" <&- >&-').returncode == 0
    assert shell(f"{COMMAND} list >&-").returncode == 0


def test_an_encoding_without_our_characters_gets_question_marks(tmp_path):
    done = shell(f"cd {tmp_path}; PYTHONIOENCODING=ascii {COMMAND} runs list 'TP 4 × PP 4'")
    assert (done.returncode, "'TP 4 ? PP 4'" in done.stdout) == (0, True), done.stderr
