# SPDX-License-Identifier: Apache-2.0
"""``--tracker``: which logger a recipe gets, under which names, and what is refused before a rank would end."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from nemo2.base.errors import ConfigError
from nemo2.base.place import here
from nemo2.cli.trackers import add_trackers, tracker_called, variables_for
from nemo2.config import Config, apply_overrides
from nemo2.config.walk import class_of
from nemo2.recipes import llama_tiny
from nemo2.training.run_dir import trackers
from nemo2.training.run_dir.directory import RunDirectory
from nemo2.training.run_dir.tracker_loggers import MLFlowTracker

KEYS = (
    "WANDB_API_KEY",
    "WANDB_MODE",
    "WANDB_IDENTITY_TOKEN_FILE",
    "COMET_API_KEY",
    "COMET_START_ONLINE",
    "COMET_CONFIG",
)


@pytest.fixture(autouse=True)
def nobody_logged_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*KEYS, "MLFLOW_TRACKING_URI", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def followed(*words: str, changes: tuple[str, ...] = ()) -> Any:
    """``recipe.log`` of a recipe as the command makes it."""
    recipe = llama_tiny.pretrain_recipe()
    add_trackers(recipe, words)
    apply_overrides(recipe, list(changes))
    return recipe.log


def names_of(log: Any) -> list[str]:
    return [
        class_of(one).__name__ for one in (log.tensorboard, log.wandb, *(log.extra_loggers or [])) if one is not None
    ]


def test_each_tracker_is_a_logger_of_the_run():
    log = followed("wandb", "mlflow", "comet:offline", "tensorboard")
    assert names_of(log) == ["TensorBoardLogger", "WandbLogger", "MLFlowTracker", "CometTracker"]
    mlflow, comet = log.extra_loggers
    assert comet.offline is True and not {"offline", "tracking_uri"} & {*log.wandb.__arguments__, *mlflow.__arguments__}


def test_a_change_says_more_of_a_tracker_and_wins():
    log = followed("wandb:offline", changes=("log.wandb.project=theirs", "log.wandb.offline=False"))
    assert (log.wandb.project, log.wandb.offline) == ("theirs", False)
    assert followed("wandb", changes=("log.wandb=None",)).wandb is None


def test_a_recipe_that_has_the_tracker_keeps_its_own():
    recipe = llama_tiny.pretrain_recipe()
    recipe.log.extra_loggers = [Config(MLFlowTracker, experiment_name="before")]
    add_trackers(recipe, ["mlflow"])
    assert [one.experiment_name for one in recipe.log.extra_loggers] == ["before"]


def test_what_a_tracker_reads_of_the_environment_goes_with_a_run_to_a_cluster(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("COMET_API_KEY", "other")
    assert variables_for(["wandb", "tensorboard"]) == {"WANDB_API_KEY": "secret"}


def test_an_unknown_tracker_is_told_the_nearest():
    with pytest.raises(
        ConfigError,
        match=r"--tracker wandbb: there is no tracker of this name; did you mean .wandb.*tensorboard, wandb, mlflow, comet",
    ):
        tracker_called("wandbb")


@pytest.mark.parametrize(
    ("kind", "arguments", "environment", "file"),
    [
        ("WandbLogger", {"offline": True}, {}, None),
        ("WandbLogger", {}, {"WANDB_MODE": "offline"}, None),
        ("WandbLogger", {}, {"WANDB_API_KEY": "x"}, None),
        ("WandbLogger", {}, {}, (".netrc", "machine api.wandb.ai login user password x")),
        (
            "WandbLogger",
            {},
            {"WANDB_BASE_URL": "https://w.example"},
            (".netrc", "machine w.example login user password x"),
        ),
        ("CometTracker", {"offline": True}, {}, None),
        ("CometLogger", {"online": False}, {}, None),
        ("CometTracker", {}, {"COMET_START_ONLINE": "0"}, None),
        ("CometTracker", {}, {"COMET_API_KEY": "x"}, None),
        ("CometTracker", {}, {}, (".comet.config", "[comet]\napi_key=x")),
        ("MLFlowTracker", {}, {}, None),
    ],
)
def test_a_login_or_staying_offline_is_enough(kind, arguments, environment, file, tmp_path, monkeypatch):
    needs_one = kind != "MLFlowTracker"
    assert (trackers.missing_login(kind, {}) is not None) == needs_one
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if file is not None:
        (tmp_path / file[0]).write_text(file[1])
        (tmp_path / file[0]).chmod(0o600)
    assert trackers.missing_login(kind, arguments) is None


def test_the_key_of_another_host_is_no_login(tmp_path):
    (tmp_path / ".netrc").write_text("machine github.com login user password x")
    (tmp_path / ".netrc").chmod(0o600)
    assert "wandb login" in (trackers.missing_login("WandbLogger", {}) or "")


def test_other_ranks_than_the_first_open_no_store(monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert here().rank == 1
    logger = MLFlowTracker(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")  # mlflow itself need not be here
    logger.keep_in(tmp_path)
    assert (logger.name, logger.version) == (None, None) and not (tmp_path / "mlflow.db").exists()


def opened(self: Any, uri: str) -> None:
    """In place of opening MLflow's store: which one that would be."""
    self._tracking_uri, self._artifact_location = uri, self._arguments["artifact_location"]
    self._run_id, self._run_name, self._experiment_name = "given", None, "given"


@pytest.mark.parametrize(
    ("given", "store", "files"),
    [
        ({}, "http://h:5000", None),
        (trackers.TRACKERS["mlflow"].offline, "sqlite:///{}/runs/mlflow.db", "file://{}/runs/mlflow"),
        ({"tracking_uri": "sqlite:////data/x.db"}, "sqlite:////data/x.db", "file://{}/runs/mlflow"),
        ({"tracking_uri": "postgresql://h/x"}, "postgresql://h/x", "file://{}/runs/mlflow"),
        ({"tracking_uri": "", "artifact_location": "s3://mine"}, "sqlite:///{}/runs/mlflow.db", "s3://mine"),
        ({"tracking_uri": "http://h:5000"}, "http://h:5000", None),
    ],
)
def test_mlflow_writes_beside_the_runs_and_never_into_the_working_directory(given, store, files, tmp_path, monkeypatch):
    monkeypatch.setattr(MLFlowTracker, "_open", opened)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://h:5000")
    logger = MLFlowTracker(**given)
    runs = tmp_path / "runs"
    directory = RunDirectory(log_dir=runs / "a" / "1", exp_dir=runs, name="a", version="1", resumed=False)
    trackers.name_run(logger, directory)
    assert logger._tracking_uri == store.format(tmp_path)
    assert logger._artifact_location == (files and files.format(tmp_path))
    trackers.name_run(logger, dataclasses.replace(directory, exp_dir=tmp_path / "others"))  # it stays where it is
    assert logger._tracking_uri == store.format(tmp_path) and {one.name for one in tmp_path.iterdir()} <= {"runs"}
