# SPDX-License-Identifier: Apache-2.0
"""How a launch ended."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from nemo2.errors import DataError
from nemo2.launch.failure import RankFailure
from nemo2.run_dir.run_folder import Chart, RunFolder

if TYPE_CHECKING:
    import pandas

Status = Literal["succeeded", "continued", "failed", "cancelled", "submitted", "dryrun"]


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended. ``exit_code`` is 0 only for a run that did what it was asked to.

    "continued" is a run that has saved and waits for the same command. ``run_dir`` is the run's directory, None if it never got
    one. ``log_dir`` holds the raw output of every rank, ``experiment_id`` is the launch's name, nemo-run's too where it goes
    through nemo-run (``nemo experiment logs <id>``). ``failure`` is set when ``status`` is "failed". ``jobs`` are Slurm's.
    What the run's files tell (`metrics`, `best_checkpoint`, `report`, `plot`) is that of ``run_dir``.
    """

    status: Status
    exit_code: int
    experiment_id: str
    log_dir: Path | None = None
    run_dir: Path | None = None
    failure: RankFailure | None = None
    seconds: float = 0.0
    jobs: tuple[str, ...] = ()

    @property
    def run(self) -> RunFolder:
        """The run's directory, with all that its files tell.

        Raises:
            DataError: the run never got a directory, or has it on a cluster.
        """
        if self.run_dir is None or not self.run_dir.is_dir():
            raise DataError(f"{self.experiment_id} ({self.status}) has no run directory on this machine.")
        return RunFolder(self.run_dir)

    @property
    def metrics(self) -> "pandas.DataFrame":
        """What the run logged, as `RunFolder.metrics`."""
        return self.run.metrics

    @property
    def best_checkpoint(self) -> Path | None:
        """As `RunFolder.best_checkpoint`."""
        return self.run.best_checkpoint

    @property
    def report(self) -> Path:
        """``report.html``, as `RunFolder.report`."""
        return self.run.report

    def plot(self, *names: str) -> Chart:
        """Curves over steps, as `RunFolder.plot`."""
        return self.run.plot(*names)
