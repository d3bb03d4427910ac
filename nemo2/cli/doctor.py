# SPDX-License-Identifier: Apache-2.0
"""``nemo2 doctor``: reports what is installed or missing, and what this machine can run."""

import sys
from dataclasses import asdict
from pathlib import Path

from nemo2.base.place import is_terminal
from nemo2.cli.adapter import Result
from nemo2.preflight.doctor.finding import Finding, checked, report


def doctor() -> Result:
    """Check the installed packages, this machine and its network.

    Exit code 1: something that nemo2 needs is broken.

    Example: nemo2 doctor --json
    """
    from nemo2.preflight.doctor.examination import examine

    findings = [*examine(), _left_behind()]
    text = report(findings, colours=is_terminal(sys.stdout))
    broken = any(finding.state == "broken" for finding in findings)
    return Result([asdict(finding) for finding in findings], text, int(broken))


def _left_behind() -> Finding:
    """Folders of killed launches, whose processes could no longer delete them."""
    from nemo_run.config import get_nemorun_home

    from nemo2.launch.local import leftovers
    from nemo2.preflight.doctor.machine import TOPIC

    folder = Path(get_nemorun_home()) / "nemo2"
    left = leftovers(folder) if folder.is_dir() else []
    return checked(
        not left,
        otherwise="note",
        topic=TOPIC,
        name="leftovers",
        value=f"{len(left)} directories of killed launches, in {folder}" if left else "none",
        costs="they contain the recipes of these runs",
        fix="the next launch deletes them; resuming a run deletes its unfinished saves",
    )
