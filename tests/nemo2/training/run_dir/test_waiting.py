# SPDX-License-Identifier: Apache-2.0
"""The line that stands on a terminal until a command has something to say."""

import io
import sys
import time

import pytest

from nemo2.training.run_dir.waiting import waiting_line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def streams(monkeypatch: pytest.MonkeyPatch) -> tuple[Terminal, Terminal]:
    """Standard streams that are a terminal. No fixture: pytest puts its own in place between a test's set-up and its call."""
    out, err = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setenv("TERM", "xterm")
    return out, err


def wait_for(stream: io.StringIO, text: str) -> None:
    deadline = time.monotonic() + 10
    while text not in stream.getvalue() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert text in stream.getvalue()


def test_a_silent_command_is_waited_for_until_its_first_output(monkeypatch):
    out, err = streams(monkeypatch)
    with waiting_line("loading", after=0.01):
        wait_for(err, "loading ...")
        print("first")
        assert err.getvalue() == "loading ...\r\033[K" and out.getvalue() == "first\n"
        assert sys.stdout is out and sys.stderr is err
        print("second")
    assert err.getvalue() == "loading ...\r\033[K" and out.getvalue() == "first\nsecond\n"


def test_a_quick_command_and_a_pipe_see_none_of_it(monkeypatch):
    out, err = streams(monkeypatch)
    with waiting_line("loading", after=60):
        print("at once")
    assert (out.getvalue(), err.getvalue()) == ("at once\n", "") and sys.stdout is out
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    with waiting_line("loading", after=0.0):
        time.sleep(0.05)
    assert pipe.getvalue() == ""


def test_a_terminal_that_cannot_clear_a_line_keeps_it(monkeypatch):
    out, err = streams(monkeypatch)
    monkeypatch.setenv("TERM", "dumb")
    with waiting_line("loading", after=0.01):
        wait_for(err, "loading ...")
        print("first")
    assert (out.getvalue(), err.getvalue()) == ("first\n", "loading ...\n")


def test_an_error_takes_the_line_away(monkeypatch):
    _, err = streams(monkeypatch)
    with pytest.raises(ValueError, match="no"), waiting_line("loading", after=0.01):
        wait_for(err, "loading ...")
        raise ValueError("no")
    assert err.getvalue().endswith("\r\033[K") and sys.stderr is err
