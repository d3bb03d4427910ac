# SPDX-License-Identifier: Apache-2.0
"""Experiment trackers by name, and the information that each tracker receives about a run beside its metrics.

The loggers are Lightning's or subclasses of Lightning's. `NeMoLogger` gives a tracker's run the name of the run
directory. `RunDirectoryCallback` passes the settings, the recipe and the environment to the trackers at the first step,
and the report at the end.
"""

import csv
import hashlib
import logging
import netrc
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional
from urllib.parse import urlsplit

import yaml

from nemo2.base.advice import advice
from nemo2.base.backend.extras import has
from nemo2.base.place import here
from nemo2.training.run_dir.directory import RunDirectory

logger = logging.getLogger(__name__)

_LIGHTNINGS_NAME = "lightning_logs"
"""The default project of Lightning's loggers."""
_OFF = frozenset({"0", "false", "no", "off"})
_NEEDS = {"MLFlowLogger": "mlflow", "CometLogger": "comet_ml"}
"""The packages of Lightning's loggers that nemo2 replaces by its own."""


@dataclass(frozen=True)
class Tracker:
    """An experiment tracker."""

    name: str
    logger: str
    """The dotted name of the logger's class."""
    package: str
    """The package to install."""
    project: str
    """The logger's argument for the group of runs of one name. "": the logger has no such argument."""
    log_field: str = "extra_loggers"
    """The field of ``recipe.log`` that holds the logger."""
    variables: tuple[str, ...] = ()
    """Environment variables that a rank on another machine also needs, if they are set here."""
    offline: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that keep all data on the machine."""

    @property
    def kind(self) -> str:
        """The name of the logger's class."""
        return self.logger.rpartition(".")[2]


TRACKERS = {
    tracker.name: tracker
    for tracker in (
        Tracker(
            "tensorboard",
            "lightning.pytorch.loggers.TensorBoardLogger",
            "tensorboard",
            project="",
            log_field="tensorboard",
        ),
        Tracker(
            "wandb",
            "lightning.pytorch.loggers.WandbLogger",
            "wandb",
            project="project",
            log_field="wandb",
            variables=("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_ENTITY", "WANDB_MODE"),
            offline={"offline": True},
        ),
        Tracker(
            "mlflow",
            "nemo2.training.run_dir.tracker_loggers.MLFlowTracker",
            "mlflow",
            project="experiment_name",
            variables=(
                "MLFLOW_TRACKING_URI",
                "MLFLOW_TRACKING_TOKEN",
                "MLFLOW_TRACKING_USERNAME",
                "MLFLOW_TRACKING_PASSWORD",
            ),
            offline={"tracking_uri": ""},
        ),
        Tracker(
            "comet",
            "nemo2.training.run_dir.tracker_loggers.CometTracker",
            "comet_ml",
            project="project",
            variables=("COMET_API_KEY", "COMET_WORKSPACE", "COMET_URL_OVERRIDE"),
            offline={"offline": True},
        ),
    )
}


def missing_login(kind: str, arguments: Mapping[str, Any]) -> Optional[str]:
    """Why the logger of this class, with these arguments, can't log in from this machine. None: it can.

    W&B and Comet ask for a key on the terminal, which a rank doesn't have, so every rank would end. Only the service
    knows whether a key is valid.
    """
    if kind == "WandbLogger":
        offline = arguments.get("offline") or os.environ.get("WANDB_MODE", "online") != "online"
        if offline or any(map(os.environ.get, ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"))) or _in_netrc():
            return None
        return (
            "W&B has no API key. Run `wandb login`, set WANDB_API_KEY, or keep the run on this machine with "
            f"{advice('--tracker wandb:offline', 'offline=True of its logger')}"
        )
    if kind in ("CometLogger", "CometTracker"):
        offline = arguments.get("offline") or arguments.get("online") is False
        if offline or os.environ.get("COMET_START_ONLINE", "1").lower() in _OFF:
            return None
        files = (os.environ.get("COMET_CONFIG"), "~/.comet.config", ".comet.config")
        if os.environ.get("COMET_API_KEY") or any(name and Path(name).expanduser().is_file() for name in files):
            return None
        return (
            "Comet has no API key. Run `comet login`, set COMET_API_KEY, or keep the run on this machine with "
            f"{advice('--tracker comet:offline', 'offline=True of its logger')}"
        )
    return None


def _in_netrc() -> bool:
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def name_run(item: Any, directory: RunDirectory) -> None:
    """Name the tracker's run after the run directory, unless it has a name. A resumed run keeps its name."""
    kind, version = type(item).__name__, directory.version or None
    if kind == "CometTracker":
        item.run_name = version
        item._project_name = item._project_name or directory.name or None
        item._experiment_key = item._experiment_key or hashlib.sha256(str(directory.log_dir).encode()).hexdigest()[:40]
        if "offline_directory" not in item._kwargs:  # Comet's own is below the working directory
            item._comet_config.offline_directory = str(directory.exp_dir / "comet")
    elif kind == "WandbLogger":
        settings = item._wandb_init
        settings["id"] = item._id = settings.get("id") or version
        settings["name"] = item._name = settings.get("name") or version
        if settings.get("project") == _LIGHTNINGS_NAME and directory.name:
            settings["project"] = item._project = directory.name
        if settings.get("anonymous", "") is None:  # Lightning sets it; newer versions of wandb warn about it
            del settings["anonymous"]
    elif kind == "MLFlowTracker" and here().rank == 0:
        item.keep_in(directory.exp_dir)
        item._run_name = item._run_name or version
        if item._experiment_name == _LIGHTNINGS_NAME and directory.name:
            item._experiment_name = directory.name
        if item._run_id is None and version:
            item._run_id = _mlflow_run(item)
    elif kind == "CSVLogger":
        if item._name == _LIGHTNINGS_NAME and directory.name:
            item._name = directory.name
        if item._version is None:
            item._version = version
        if here().rank == 0 and directory.resumed and item._version is not None:
            _continue_csv(item)


def _continue_csv(item: Any) -> None:
    """Let the logger append to the metrics of the run so far, which Lightning's writer deletes when it begins."""
    file = Path(item.log_dir) / "metrics.csv"
    aside = file.with_suffix(".before")
    if aside.is_file() and not file.exists():  # killed between the two names
        aside.rename(file)
    if not file.is_file():
        return
    file.rename(aside)
    try:
        with warnings.catch_warnings(action="ignore"):  # of the deletion
            writer = item.experiment
    finally:
        aside.rename(file)
    with file.open(newline="") as lines:
        writer.metrics_keys = next(csv.reader(lines), [])


def _mlflow_run(item: Any) -> Optional[str]:
    """The id of the run of this name in the experiment. None: the experiment has no such run yet."""
    client = item._mlflow_client
    experiment = client.get_experiment_by_name(item._experiment_name)
    if experiment is None:
        return None
    name = item._run_name.replace("'", "\\'")
    runs = client.search_runs([experiment.experiment_id], f"attributes.run_name = '{name}'", max_results=1)
    return runs[0].info.run_id if runs else None


def describe_run(loggers: Iterable[Any], settings: Mapping[str, Any], files: Iterable[Path]) -> None:
    """Pass each tracker the settings in force, and the files. A tracker that fails only causes a warning, because
    the run directory has the same data."""
    for item in loggers:
        with _warning_on_failure(item):
            if type(item).__name__ == "TensorBoardLogger":
                text = yaml.safe_dump(dict(settings), sort_keys=False, width=120)
                item.experiment.add_text("effective_config", f"```yaml\n{text}```")
            else:
                item.log_hyperparams(dict(settings))
    attach(loggers, files)


def attach(loggers: Iterable[Any], files: Iterable[Path]) -> None:
    """Give each tracker that stores files the existing ones among ``files``. Failures only cause warnings."""
    existing = [path for path in files if path.is_file()]
    for item in loggers:
        if attach_file := _ATTACH.get(type(item).__name__):
            for path in existing:
                with _warning_on_failure(item):
                    attach_file(item, path)


def _to_wandb(item: Any, path: Path) -> None:
    # A copy, because wandb links files outside its folder and warns about each link.
    copied = shutil.copy(path, item.experiment.dir)
    item.experiment.save(copied, base_path=item.experiment.dir, policy="now")


_ATTACH: dict[str, Callable[[Any, Path], Any]] = {
    "WandbLogger": _to_wandb,
    "MLFlowTracker": lambda item, path: item.experiment.log_artifact(item.run_id, str(path)),
    "CometTracker": lambda item, path: item.experiment.log_asset(str(path), overwrite=True),
}


def keep_running(item: Any) -> None:
    """Let a run go on if ``item`` fails to record metrics, as on a full disk or without its service: the run directory has
    the same data. Idempotent."""
    reported: list[str] = []
    for method in ("log_metrics", "save", "finalize"):
        setattr(item, method, _Warned(item, method, reported))


@dataclass(frozen=True, eq=False)
class _Warned:
    """A method of a logger. All failures of the logger cause one warning."""

    item: Any
    method: str
    reported: list[str]

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        item, kind = self.item, type(self.item)
        # Lightning's raise errors of services, and ValueError for any. A user's own may raise to end the run.
        failures = Exception if kind.__module__.startswith(("lightning.", "nemo2.")) else OSError
        try:
            getattr(kind, self.method)(item, *args, **kwargs)
        except failures as error:
            if not self.reported:
                self.reported.append(self.method)
                logger.warning(
                    "%s can't record the run's metrics in %s (%s). The run goes on without it; metrics.jsonl has them.",
                    kind.__name__,
                    item.save_dir,
                    error.__cause__ or error,
                )


@contextmanager
def _warning_on_failure(item: Any) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # an unavailable service must not end a run
        logger.warning(
            "%s did not receive the run's settings or files: %s: %s", type(item).__name__, type(error).__name__, error
        )


def missing_package(kind: str) -> Optional[str]:
    """The package that the logger of this class needs and that isn't installed. None: nothing is missing."""
    package = (_NEEDS | {tracker.kind: tracker.package for tracker in TRACKERS.values()}).get(kind)
    return package if package is not None and not has(package) else None
