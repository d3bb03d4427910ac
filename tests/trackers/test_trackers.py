# SPDX-License-Identifier: Apache-2.0
"""What the services' own clients have of a run, offline: its metrics under its names, its settings, its files, once."""

import json
import logging
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger

from nemo2.training.run_dir.logger import NeMoLogger
from nemo2.training.run_dir.tracker_loggers import CometTracker, MLFlowTracker
from nemo2.training.run_dir.trackers import TRACKERS

pytestmark = pytest.mark.trackers


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder, in which nobody leaves anything."""
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    yield folder
    assert list(folder.iterdir()) == []


FILES = {"recipe.json", "effective_config.yaml", "environment.json", "report.html"}


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        self.log_dict({"reduced_train_loss": float(10 - self.trainer.global_step)})
        return (self.weight * batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(folder: Path, logger: Any, version: str = "first", steps: int = 3) -> Path:
    """A run of three steps that ``logger`` follows; its directory."""
    trainer = Trainer(
        accelerator="cpu", max_steps=steps, log_every_n_steps=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    # A run with an earlier one's metrics would have to resume.
    (folder / "tiny" / version / "metrics.jsonl").unlink(missing_ok=True)
    log = NeMoLogger("tiny", log_dir=str(folder), version=version, extra_loggers=[logger])
    run = log.setup(trainer).log_dir
    (run / "recipe.json").write_text("{}")
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.zeros(8, 1)))
    return run


def test_mlflow_has_the_run_once_with_metrics_settings_and_files(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    for steps in (2, 3):  # the second goes on with the first
        trained(tmp_path, MLFlowTracker(), steps=steps)
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("tiny")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "first" and run.info.status == "FINISHED"
    losses = client.get_metric_history(run.info.run_id, "reduced_train_loss")
    assert {(one.step, one.value) for one in losses} == {(0, 10.0), (1, 9.0), (2, 8.0)}
    assert run.data.params["trainer/world_size"] == "1"
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == FILES


def test_mlflow_keeps_the_first_value_of_a_setting_that_has_changed_and_takes_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logger = MLFlowTracker(run_name="one", tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    logger.log_hyperparams({"trainer": {"max_steps": 5, "long": "x" * 300}})
    logger.log_hyperparams({"trainer": {"max_steps": 8, "long": "x" * 300}, "data": {"seed": 1}})
    stored = logger.experiment.get_run(logger.run_id).data.params
    assert stored == {"trainer/max_steps": "5", "trainer/long": "x" * 250, "data/seed": "1"}
    assert "trainer/max_steps (5 -> 8)" in caplog.text and "long" not in caplog.text


def test_comet_has_the_run_in_an_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMET_START_ONLINE", "1")  # which the logger changes
    logger = CometTracker(offline=True, offline_directory=str(tmp_path / "comet"))
    trained(tmp_path, logger)
    assert logger.experiment.project_name == "tiny" and logger.experiment.get_name() == "first"
    logger.experiment.end()
    (archive,) = (tmp_path / "comet").glob("*.zip")
    with zipfile.ZipFile(archive) as files:
        said = [json.loads(line) for line in files.read("messages.json").splitlines()]
    metrics = [one["payload"]["metric"] for one in said if one["type"] == "metric_msg"]
    assert {
        (one["step"], float(one["metricValue"])) for one in metrics if one["metricName"] == "reduced_train_loss"
    } == {(0, 10.0), (1, 9.0), (2, 8.0)}
    names = {
        Path((one["payload"].get("additional_params") or {}).get("fileName") or "").name
        for one in said
        if one["type"] == "file_upload"
    }
    assert names >= FILES


def test_wandb_has_the_run_under_its_version_and_goes_on_with_it(tmp_path: Path) -> None:
    import wandb

    logger = WandbLogger(offline=True)
    run = trained(tmp_path, logger)
    service = logger.experiment
    assert (service.project, service.name, service.id) == ("tiny", "first", "first")
    assert service.config["trainer"]["max_steps"] == 3
    folder = Path(service.dir)
    assert {file.name for file in folder.iterdir()} >= FILES and folder.is_relative_to(run)
    wandb.finish()
    # Another process writes the file, a block of 32 KiB at a time, and finish() doesn't wait for the last one; teardown() does.
    wandb.teardown()
    (written,) = (run / "wandb").glob("offline-run-*/run-first.wandb")
    assert b"reduced_train_loss" in written.read_bytes()


def test_tensorboard_has_the_settings_as_text(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = trained(tmp_path, TensorBoardLogger(str(tmp_path), name="x"))
    events = EventAccumulator(str(run / "tb_logs"))
    events.Reload()
    (text,) = events.Tensors("effective_config/text_summary")
    assert b"max_steps: 3" in text.tensor_proto.string_val[0]


@pytest.mark.parametrize("kind", ["comet", "mlflow", "wandb"])
def test_a_service_that_fails_is_warned_of_and_the_run_goes_on(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    make: dict[str, Callable[[], Any]] = {
        "comet": lambda: CometTracker(offline=True, offline_directory=str(tmp_path / "comet")),
        "mlflow": lambda: MLFlowTracker(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}"),
        "wandb": lambda: WandbLogger(offline=True),
    }
    logger = make[kind]()

    def fails(*_: Any, **__: Any) -> None:
        raise ConnectionError("the service is away")

    monkeypatch.setattr(type(logger), "log_hyperparams", fails)
    with caplog.at_level(logging.WARNING, logger="nemo2"):
        run = trained(tmp_path, logger)
    assert (run / "report.html").is_file()
    said = f"{TRACKERS[kind].kind} did not receive the run's settings or files: ConnectionError: the service is away"
    assert said in caplog.text
