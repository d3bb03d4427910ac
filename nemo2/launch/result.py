# SPDX-License-Identifier: Apache-2.0
"""How a launch ended."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nemo2.launch.failure import RankFailure

Status = Literal["succeeded", "continued", "failed", "cancelled", "submitted", "dryrun"]


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended. ``exit_code`` is 0 only for a run that did what it was asked to.

    "continued" is a run that has saved and waits for the same command. ``run_dir`` is the run's directory, None if it never got
    one. ``log_dir`` holds the raw output of every rank, ``experiment_id`` is the launch's name, nemo-run's too where it goes
    through nemo-run (``nemo experiment logs <id>``). ``failure`` is set when ``status`` is "failed". ``jobs`` are Slurm's.
    """

    status: Status
    exit_code: int
    experiment_id: str
    log_dir: Path | None = None
    run_dir: Path | None = None
    failure: RankFailure | None = None
    seconds: float = 0.0
    jobs: tuple[str, ...] = ()
