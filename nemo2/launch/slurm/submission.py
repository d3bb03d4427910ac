# SPDX-License-Identifier: Apache-2.0
"""The record of a run that Slurm has. Reading it loads neither nemo-run nor torch."""

import json
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nemo2.launch.slurm.shell import Shell, shell_of
from nemo2.training.run_dir.records import write_text


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A run that Slurm has, with everything to find it again from another shell."""

    name: str
    folder: str
    jobs: list[str]
    ssh: dict[str, Any] = field(default_factory=dict)
    """The host, user, port and identity of the tunnel. {}: this machine."""

    def save(self) -> None:
        submissions().mkdir(parents=True, exist_ok=True)
        write_text(submissions() / f"{Path(self.folder).name}.json", json.dumps(asdict(self), indent=1) + "\n")

    def shell(self) -> Shell:
        if not self.ssh:
            return shell_of(None)
        from nemo_run import SSHTunnel

        return shell_of(SSHTunnel(job_dir="", **self.ssh))


def submissions() -> Path:
    """The folder in which this user's submissions are recorded, below nemo-run's."""
    return nemo_run_home() / "nemo2" / "jobs"


def nemo_run_home() -> Path:
    """nemo-run's folder, without importing nemo-run."""
    nemo_run = sys.modules.get("nemo_run.config")  # a program may have set another folder there
    home = os.environ.get("NEMORUN_HOME", os.path.expanduser("~/.nemo_run"))
    return Path(nemo_run.get_nemorun_home() if nemo_run is not None else home)
