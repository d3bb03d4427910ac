# SPDX-License-Identifier: Apache-2.0
"""Loggers for MLflow and Comet that, unlike Lightning's own, fit a run of many ranks that resumes."""

import os
from pathlib import Path
from typing import Any, Optional

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CometLogger, MLFlowLogger
from lightning.pytorch.loggers.logger import Logger

from nemo2.config.capture import configurable
from nemo2.place import here
from nemo2.run_dir.directory import DEFAULT_BASE

_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")


@configurable
class MLFlowTracker(MLFlowLogger):
    """Lightning's MLFlowLogger whose first rank alone opens the store, and that writes nothing into the working directory.

    MLflow's client lays out a new database as soon as it is made, and two ranks that do so at once break it. A store that nobody
    named is ``mlflow.db`` beside the runs, and a database without a server has its files in ``mlflow`` there; MLflow's defaults
    are ``./mlruns`` for both.
    """

    def __init__(
        self,
        experiment_name: str = "lightning_logs",
        run_name: Optional[str] = None,
        tracking_uri: Optional[str] = None,
        tags: Optional[dict[str, Any]] = None,
        artifact_location: Optional[str] = None,
        run_id: Optional[str] = None,
    ) -> None:
        """
        Args:
            experiment_name: what holds the runs; Lightning's default stands for the run's name.
            run_name: None takes the run's version, the name of its folder.
            tracking_uri: of the server or the database; None reads MLFLOW_TRACKING_URI, and without that stands for
                ``mlflow.db`` in the folder that holds the runs.
            tags: of the run.
            artifact_location: where a new experiment keeps files; None leaves it to a server, and without one stands for
                ``mlflow`` beside the runs.
            run_id: of an MLflow run to go on with; None finds the one of this name, or begins it.
        """
        self._given = {
            "experiment_name": experiment_name,
            "run_name": run_name,
            "tags": tags,
            "artifact_location": artifact_location,
            "run_id": run_id,
        }
        uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", "")
        if here().rank == 0 and uri:
            self._open(uri)
            return
        Logger.__init__(self)
        self._tracking_uri = uri
        self._log_model = False
        self._initialized = False

    def _open(self, uri: str) -> None:
        super().__init__(**self._given, tracking_uri=uri, log_model=False)

    def keep_in(self, folder: Path) -> None:
        """Open a store in ``folder`` where nobody named another, and have files of a database without a server there."""
        if here().rank != 0:
            return
        if not self._tracking_uri:
            folder.mkdir(parents=True, exist_ok=True)
            self._open(f"sqlite:///{folder.absolute() / 'mlflow.db'}")
        if self._artifact_location is None and self._tracking_uri.startswith(_DATABASES):
            self._artifact_location = (folder.absolute() / "mlflow").as_uri()

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        self.keep_in(Path(DEFAULT_BASE))  # does nothing where it has been
        return super().experiment

    @property
    def name(self) -> Optional[str]:
        return super().name if here().rank == 0 else None

    @property
    def version(self) -> Optional[str]:
        return super().version if here().rank == 0 else None


@configurable
class CometTracker(CometLogger):
    """Lightning's CometLogger, which begins its experiment once the run's directory is known, and can stay offline.

    Lightning's begins it while the trainer is built, so a resumed run would be a second experiment, and its
    ``online=False`` records nothing.
    """

    def __init__(
        self,
        project: Optional[str] = None,
        workspace: Optional[str] = None,
        experiment_key: Optional[str] = None,
        offline: bool = False,
        offline_directory: Optional[str] = None,
    ) -> None:
        """
        Args:
            project: None takes the run's name.
            workspace: None takes the user's own.
            experiment_key: of an experiment to go on with; None derives it from the run's folder.
            offline: write an archive for `comet upload` rather than to the service.
            offline_directory: for these archives; None is ``comet`` in the folder that holds the runs.
        """
        if offline:
            os.environ["COMET_START_ONLINE"] = "0"
        more: dict[str, Any] = {"display_summary_level": 0}
        if offline_directory is not None:
            more["offline_directory"] = offline_directory
        self._begins = False
        super().__init__(project=project, workspace=workspace, experiment_key=experiment_key, **more)
        self._begins = True
        self.run_name: Optional[str] = None

    def _create_experiment(self) -> None:
        if not self._begins:
            return
        super()._create_experiment()
        if self.run_name is not None and self._experiment is not None:
            self._experiment.set_name(self.run_name)
