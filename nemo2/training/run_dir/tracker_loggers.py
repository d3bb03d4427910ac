# SPDX-License-Identifier: Apache-2.0
"""Loggers for MLflow and Comet that, unlike Lightning's, support runs with many ranks and runs that resume."""

import logging
import os
from pathlib import Path
from typing import Any, Literal, Optional, Union

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.fabric.utilities.logger import _convert_params, _flatten_dict
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import CometLogger, MLFlowLogger
from lightning.pytorch.loggers.logger import Logger

from nemo2.base.names import listed
from nemo2.base.place import here
from nemo2.config.capture import configurable
from nemo2.training.run_dir.directory import DEFAULT_BASE

_log = logging.getLogger(__name__)
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")


@configurable
class MLFlowTracker(MLFlowLogger):
    """Lightning's MLFlowLogger, with a store that only rank 0 opens and that is outside the working directory.

    MLflow's client creates the tables of a new database when the client is created. Two ranks that do so at the same
    time damage the database.

    By default the store is ``mlflow.db`` in the folder that holds the runs. A database without a server keeps its files
    in ``mlflow`` in the same folder. MLflow's default for both is ``./mlruns``.
    """

    def __init__(
        self,
        experiment_name: str = "lightning_logs",
        run_name: Optional[str] = None,
        tracking_uri: Optional[Union[Literal[""], str]] = None,
        tags: Optional[dict[str, Any]] = None,
        artifact_location: Optional[str] = None,
        run_id: Optional[str] = None,
    ) -> None:
        """
        Args:
            experiment_name: the MLflow experiment. Lightning's default, "lightning_logs", becomes the run's name.
            run_name: the name of the MLflow run. None: the run's version, which is the name of its folder.
            tracking_uri: the server or the database. None: the variable MLFLOW_TRACKING_URI. "", also of the variable:
                ``mlflow.db`` in the folder that holds the runs.
            tags: tags of the MLflow run.
            artifact_location: the place of a new experiment's files. None: the server decides. Without a server:
                ``mlflow`` in the folder that holds the runs.
            run_id: the MLflow run to continue. None: the run named ``run_name``, which is created if it doesn't exist.
        """
        self._arguments = {
            "experiment_name": experiment_name,
            "run_name": run_name,
            "tags": tags,
            "artifact_location": artifact_location,
            "run_id": run_id,
        }
        uri = os.environ.get("MLFLOW_TRACKING_URI", "") if tracking_uri is None else tracking_uri
        if here().rank == 0 and uri:
            self._open(uri)
            return
        Logger.__init__(self)
        self._tracking_uri = uri
        self._log_model = False
        self._initialized = False

    def _open(self, uri: str) -> None:
        super().__init__(**self._arguments, tracking_uri=uri, log_model=False)

    def keep_in(self, folder: Path) -> None:
        """Open a store in ``folder`` unless another store is set, and keep the files of a database without a server
        there."""
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
        self.keep_in(Path(DEFAULT_BASE))  # does nothing if a folder was set before
        return super().experiment

    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        """Record the settings. MLflow refuses another value for one that it has, and with it all that are sent together."""
        settings, stored = _flatten_dict(_convert_params(params)), self.experiment.get_run(self.run_id).data.params
        # MLflow has the first 250 characters of a value.
        changed = {name for name, value in settings.items() if stored.get(name, str(value)[:250]) != str(value)[:250]}
        super().log_hyperparams({name: value for name, value in settings.items() if name not in changed})
        if changed:
            _log.warning(
                "MLflow keeps the first values of settings that have changed since: %s. effective_config.yaml has those in "
                "force.",
                listed(f"{name} ({stored[name]} -> {settings[name]})" for name in sorted(changed)),
            )

    @property
    def name(self) -> Optional[str]:
        return super().name if here().rank == 0 else None

    @property
    def version(self) -> Optional[str]:
        return super().version if here().rank == 0 else None


@configurable
class CometTracker(CometLogger):
    """Lightning's CometLogger, which creates its experiment once the run's directory is known, and can stay offline.

    Lightning's logger creates the experiment while the trainer is built, so a resumed run would become a second
    experiment. Its ``online=False`` records nothing.
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
            project: the Comet project. None: the run's name.
            workspace: the Comet workspace. None: the user's default workspace.
            experiment_key: the key of an experiment to continue. None: a key derived from the run's folder.
            offline: write an archive for `comet upload` instead of sending data to the service.
            offline_directory: the folder of these archives. None: ``comet`` in the folder that holds the runs.
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
