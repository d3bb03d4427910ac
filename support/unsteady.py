# SPDX-License-Identifier: Apache-2.0
"""``pytest -p support.unsteady``: a test that fails among others is run again alone, once.

If it passes then, it is unsteady: the run counts it apart and is not failed by it, its last lines name it, and the
traceback of its failure is in ``unsteady/``. An unsteady test is a defect to be explained. ``tests/unsteady.json`` says
since when one has been known. A test that was unsteady `MAX_DAYS` ago gets no second run, so that it fails the run until
it is mended.
More than `MAX_TESTS` failures have another cause than unsteady tests, and none is run again.
"""

import datetime
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

KNOWN = Path("tests", "unsteady.json")
"""Test → the day on which it was first seen to be unsteady."""
FOLDER = Path("unsteady")
MAX_TESTS = 10
MAX_DAYS = 7


def known_for_too_long(known: dict[str, str], today: datetime.date) -> set[str]:
    """The tests that have been known as unsteady for more than `MAX_DAYS`."""
    limit = today - datetime.timedelta(days=MAX_DAYS)
    return {test for test, day in known.items() if datetime.date.fromisoformat(day) < limit}


def passes_alone(test: str, root: Path) -> bool:
    """Whether a test passes in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    return subprocess.run(command, cwd=root, capture_output=True, check=False).returncode == 0


class RunAgain:
    """Lives in the process that reports: with workers, not in one of them."""

    def __init__(self) -> None:
        self.unsteady: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
        reports = [*reporter.stats.get("failed", ()), *reporter.stats.get("error", ())]
        tests = dict.fromkeys(report.nodeid for report in reports)
        collected = all(isinstance(report, pytest.TestReport) for report in reports)
        if session.exitstatus != pytest.ExitCode.TESTS_FAILED or not collected or len(tests) > MAX_TESTS:
            return
        root = session.config.rootpath
        known = json.loads((root / KNOWN).read_text())
        retried = [test for test in tests if test not in known_for_too_long(known, datetime.date.today())]
        self.unsteady = [test for test in retried if passes_alone(test, root)]
        for kind in ("failed", "error"):
            steady = [report for report in reporter.stats.get(kind, ()) if report.nodeid not in self.unsteady]
            reporter.stats[kind] = steady
            if not steady:
                del reporter.stats[kind]
        for report in reports:
            if report.nodeid in self.unsteady:
                (root / FOLDER).mkdir(exist_ok=True)
                with (root / _file_of(report.nodeid)).open("a") as file:
                    file.write(f"{report.nodeid}\n{report.longreprtext}\n")
                    file.writelines(f"\n{title}\n{text}" for title, text in report.sections)
        if len(self.unsteady) == len(tests):
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.unsteady:
            terminalreporter.section(
                "unsteady: failed, then passed alone; explain each, and list it in tests/unsteady.json"
            )
            for test in self.unsteady:
                terminalreporter.line(f"UNSTEADY {test}: {_file_of(test)}")


def _file_of(test: str) -> Path:
    return FOLDER / (re.sub(r"[^\w.-]+", "-", test)[-120:] + ".txt")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(RunAgain(), "run_again")
