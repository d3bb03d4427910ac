# SPDX-License-Identifier: Apache-2.0
"""``nemo2 doctor``: reports what is installed or missing, and what this machine can run."""

import sys
from pathlib import Path

import typer

from nemo2.cli.flags import AsJson, print_json
from nemo2.doctor import Finding
from nemo2.run_dir.terminal import is_terminal

DOCTOR_EXAMPLE = "Example: nemo2 doctor --json"


def register(app: typer.Typer) -> None:
    app.command("doctor", epilog=DOCTOR_EXAMPLE)(doctor)


def doctor(as_json: AsJson = False) -> None:
    """Check the installed packages, this machine and its network.

    Exit code 1: something that nemo2 needs is broken.
    """
    from nemo2.doctor import examine, report

    findings = [*examine(), _left_behind()]
    if as_json:
        print_json([finding.as_dict() for finding in findings])
    else:
        print(report(findings, colours=is_terminal(sys.stdout)))
    if any(finding.state == "broken" for finding in findings):
        raise typer.Exit(1)


def _left_behind() -> Finding:
    """Folders of killed launches, whose processes could no longer delete them."""
    from nemo_run.config import get_nemorun_home

    from nemo2.doctor.machine import TOPIC
    from nemo2.launch.local import leftovers

    folder = Path(get_nemorun_home()) / "nemo2"
    found = leftovers(folder) if folder.is_dir() else []
    return Finding(
        topic=TOPIC,
        name="leftovers",
        state="note" if found else "ok",
        value=f"{len(found)} directories of killed launches, in {folder}" if found else "none",
        costs="they contain the recipes of these runs" if found else "",
        fix="the next launch deletes them; resuming a run deletes its unfinished saves" if found else "",
    )
