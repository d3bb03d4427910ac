# SPDX-License-Identifier: Apache-2.0
"""``nemo2 doctor``: what is installed, what is missing, and what this machine can run."""

import json
import sys
from typing import Annotated

import typer

from nemo2.run_dir.terminal import is_terminal

DOCTOR_EXAMPLE = "Example: nemo2 doctor --json"


def register(app: typer.Typer) -> None:
    app.command("doctor", epilog=DOCTOR_EXAMPLE)(doctor)


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False) -> None:
    """Look at the packages, the machine and its network. Exit code 1 where something that nemo2 needs is broken."""
    from nemo2.doctor import examine, report

    findings = examine()
    if as_json:
        print(json.dumps([finding.as_dict() for finding in findings], indent=2))
    else:
        print(report(findings, colours=is_terminal(sys.stdout)))
    if any(finding.state == "broken" for finding in findings):
        raise typer.Exit(1)
