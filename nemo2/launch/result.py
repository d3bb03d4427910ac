# SPDX-License-Identifier: Apache-2.0
"""The result of a launch."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from nemo2.base.errors import DataError
from nemo2.launch.failure import RankFailure
from nemo2.training.run_dir.run_folder import Chart, RunFolder

if TYPE_CHECKING:
    import pandas

Status = Literal["succeeded", "continued", "failed", "cancelled", "submitted", "dryrun"]


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The result of a run.

    `metrics`, `best_checkpoint`, `report` and `plot` read the files in ``run_dir``.
    """

    status: Status
    """"succeeded", "continued", "failed", "cancelled", "submitted" or "dryrun". "continued" means that the run has
    saved and that running the same command resumes it."""
    exit_code: int
    """0 only if the run did all that it was asked to do."""
    experiment_id: str
    """The launch's name, also in nemo-run if the launch uses nemo-run (``nemo experiment logs <id>``)."""
    log_dir: Path | None = None
    """The folder with the raw output of every rank. None: the launch has no such folder on this machine."""
    run_dir: Path | None = None
    """The run's directory. None: the run never created a directory."""
    failure: RankFailure | None = None
    """The failure. None: ``status`` isn't "failed"."""
    seconds: float = 0.0
    """The duration of the launch. 0: the launch did not wait for the run."""
    jobs: tuple[str, ...] = ()
    """Slurm's job ids, or the name of Kubeflow's TrainJob. Empty: neither is used."""

    @property
    def run(self) -> RunFolder:
        """The run's directory, with access to its files.

        Raises:
            DataError: the run never created a directory, or the directory is on a cluster.
        """
        if self.run_dir is None or not self.run_dir.is_dir():
            raise DataError(f"{self.experiment_id} ({self.status}) has no run directory on this machine.")
        return RunFolder(self.run_dir)

    @property
    def metrics(self) -> "pandas.DataFrame":
        """The run's logged metrics, as in `RunFolder.metrics`."""
        return self.run.metrics

    @property
    def best_checkpoint(self) -> Path | None:
        """The run's best checkpoint, as in `RunFolder.best_checkpoint`."""
        return self.run.best_checkpoint

    @property
    def report(self) -> Path:
        """The run's ``report.html``, as in `RunFolder.report`."""
        return self.run.report

    def plot(self, *names: str) -> Chart:
        """Curves of metrics over steps, as in `RunFolder.plot`."""
        return self.run.plot(*names)
