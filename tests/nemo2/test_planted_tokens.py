# SPDX-License-Identifier: Apache-2.0
"""Tokens planted where users have them: no file of a run, of its launch or its checkpoints holds one, nor the console."""

import base64
import logging
import os
import re
import stat
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import nemo_run
import pytest

from nemo2.base.errors import ConfigError
from nemo2.cli.app import main
from nemo2.config import Config
from nemo2.launch import launch
from nemo2.preflight.checks import check_recipe
from nemo2.recipes import llama_tiny
from nemo2.training.run_dir.faults import FAULT_DIR_VARIABLE, read_faults, record_fault
from nemo2.training.run_dir.log_files import add_log_file, remove_log_file
from nemo2.training.run_dir.logger import NeMoLogger

PLANTED = "planted-4711-token-of-a-user"
SETTINGS = [
    *("trainer.devices=1", "trainer.max_steps=1", "trainer.limit_val_batches=0", "trainer.log_every_n_steps=1"),
    *(
        "strategy.tensor_model_parallel_size=1",
        "strategy.sequence_parallel=False",
        "data.seq_length=64",
        "data.max_bytes=100000",
        "model.config.num_layers=1",
    ),
]


def texts(folder: Path) -> Iterator[tuple[Path, bytes]]:
    """Each file, and what lies compressed in it, as nemo-run's settings do. torch's archives aren't compressed."""
    for file in folder.rglob("*"):
        if not file.is_file():
            continue
        content = file.read_bytes()
        yield file, content
        for packed in re.findall(rb"[A-Za-z0-9_+/=-]{40,}", content):
            try:
                yield file, zlib.decompress(base64.b64decode(packed, altchars=b"-_"))
            except (zlib.error, ValueError):
                continue


def leaks(folder: Path) -> list[Path]:
    return [file for file, content in texts(folder) if PLANTED.encode() in content]


def test_the_search_sees_what_nemo_run_packs(tmp_path):
    packed = base64.urlsafe_b64encode(zlib.compress(f"x {PLANTED} y".encode()))
    (tmp_path / "a").write_bytes(b"{" + packed + b"}")
    assert leaks(tmp_path) == [tmp_path / "a"]


def test_a_run_leaves_no_token_anywhere(tmp_path, warm_interpreter):
    secret = ("HF_TOKEN", "WANDB_API_KEY", "COMET_API_KEY", "MLFLOW_TRACKING_PASSWORD", "MY_SECRET", "SLURM_JWT")
    environment = {**os.environ, **dict.fromkeys(secret, PLANTED), "NEMORUN_HOME": str(tmp_path / "home")}
    environment["HTTPS_PROXY"] = f"http://me:{PLANTED}@proxy"
    command = [warm_interpreter, "-m", "nemo2", "pretrain", "llama_tiny", *SETTINGS, f"log.log_dir={tmp_path / 'runs'}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert PLANTED not in done.stdout + done.stderr
    assert list(tmp_path.glob("runs/*/*/checkpoints/*/context/*.json")), "the run saved"
    assert leaks(tmp_path) == []
    (settings,) = tmp_path.glob("home/experiments/*")
    assert stat.S_IMODE(settings.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "override",
    [
        f"log.wandb.api_key={PLANTED}",
        f'log.extra_loggers=[{{"api_key":"{PLANTED}"}}]',
        f'log.wandb={{"api_key": "{PLANTED}"}}',
        f"resume.restore_config.path=https://me:{PLANTED}@host/x",
        f"no.such.password={PLANTED}",
        f"data.paths=https://me:{PLANTED}@host/x",
    ],
)
def test_an_override_that_is_refused_is_told_without_its_secret(override, capsys):
    assert main(["pretrain", "llama_tiny", override, "--dryrun"]) == 2
    out, err = capsys.readouterr()
    assert "error: " in err and PLANTED not in out + err


def test_a_dry_run_shows_no_token(monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", PLANTED)
    assert main(["pretrain", "llama_tiny", "--dryrun"]) == 0
    assert PLANTED not in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    "value", [{"api_key": PLANTED}, {"uri": f"https://me:{PLANTED}@host"}, {"notes": "see hf_" + "x1" * 17}]
)
def test_a_recipe_that_holds_one_is_refused_wherever_it_stands(value):
    recipe = llama_tiny.pretrain_recipe()
    recipe.log = Config(NeMoLogger, extra_loggers=[value])
    with pytest.raises(ConfigError, match="holds a secret") as caught:
        check_recipe(recipe)
    assert PLANTED not in str(caught.value)


class Task:
    """SkyPilot's, as far as nemo-run's dry run shows it."""

    def __init__(self, **given: Any) -> None:
        self.given = given

    def update_envs(self, variables: dict[str, str]) -> None:
        self.given["envs"] = {**self.given["envs"], **variables}

    def to_yaml_config(self) -> dict[str, Any]:
        return self.given

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self


@pytest.mark.parametrize("kind", ["docker", "dgxcloud", "lepton", "skypilot", "skypilot_jobs"])
def test_executors_that_write_variables_down_do_so_in_private(kind, tmp_path, monkeypatch, capsys):
    """nemo-run passes variables of a job through its files: said, in a folder that nobody else reads, and a dry run, which shows
    these files, has a placeholder in the place of each."""
    monkeypatch.setattr("nemo_run.config._NEMORUN_HOME", str(tmp_path / "home"))
    made = {
        "docker": lambda: nemo_run.DockerExecutor(container_image="i"),
        "dgxcloud": lambda: nemo_run.DGXCloudExecutor(
            **dict.fromkeys(("base_url", "kube_apiserver_url", "client_id", "client_secret", "project_name"), "x"),
            container_image="i",
            pvc_nemo_run_dir="/p",
            pvcs=[{"path": "/p"}],
        ),
        "lepton": lambda: nemo_run.LeptonExecutor(
            container_image="i", nemo_run_dir="/p", node_group="g", resource_shape="gpu.8xh100-sxm"
        ),
        "skypilot": lambda: nemo_run.SkypilotExecutor(container_image="i", cloud="c"),
        "skypilot_jobs": lambda: nemo_run.SkypilotJobsExecutor(container_image="i", cloud="c"),
    }
    # A dry run asks for no more than that it is there.
    monkeypatch.setattr("nemo_run.core.execution.skypilot._SKYPILOT_AVAILABLE", True)
    monkeypatch.setattr("nemo_run.core.execution.skypilot_jobs._SKYPILOT_AVAILABLE", True)
    for name in ("sky", "sky.data", "sky.resources", "sky.task", "sky.utils"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    monkeypatch.setattr(sys.modules["sky.task"], "Task", Task)
    monkeypatch.setattr(sys.modules["sky.utils"].common_utils, "dump_yaml_str", str)
    executor = made[kind]()
    recipe = llama_tiny.pretrain_recipe()
    launch(recipe, executor, devices=1, dryrun=True, check=False, env={"HF_TOKEN": PLANTED})
    out, err = capsys.readouterr()
    assert "warning: HF_TOKEN will be written into the job's script" in err
    assert PLANTED not in out + err
    assert leaks(tmp_path) == [], "a dry run needs no secrets"
    (settings,) = tmp_path.glob("home/experiments/*")
    assert stat.S_IMODE(settings.stat().st_mode) == 0o700, "where a launch writes them"


def test_a_manifest_of_kubernetes_has_none(monkeypatch, capsys):
    # A dry run asks for no more than that the client is there.
    monkeypatch.setattr("nemo_run.core.execution.kubeflow._KUBERNETES_AVAILABLE", True)
    monkeypatch.setattr("nemo_run.KubeflowExecutor._load_kube_clients", lambda self: None)
    recipe = llama_tiny.pretrain_recipe(dir="/data/runs")
    executor = nemo_run.KubeflowExecutor(image="i", volume_mounts=[{"name": "data", "mountPath": "/data"}])
    launch(recipe, executor, devices=1, dryrun=True, check=False, env={"HF_TOKEN": PLANTED, "PLAIN": "kept"})
    out, err = capsys.readouterr()
    assert "warning: HF_TOKEN would be readable in the manifest" in err
    assert PLANTED not in out + err
    assert "name: PLAIN\n      value: kept" in out


def test_faults_and_log_files_lose_the_token_that_an_error_quotes(tmp_path, monkeypatch):
    """As the errors of HTTP libraries do."""
    monkeypatch.setenv("HF_TOKEN", PLANTED)
    monkeypatch.setenv(FAULT_DIR_VARIABLE, str(tmp_path))
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    try:
        raise OSError(f"401 for Bearer {PLANTED}")
    except OSError as error:
        record_fault(error)
    add_log_file(tmp_path / "log.txt")
    logging.getLogger("nemo2").warning("the hub refused %s", PLANTED)
    remove_log_file()
    [fault] = read_faults(tmp_path)
    assert "401 for Bearer <redacted>" in fault.message and "401 for Bearer <redacted>" in fault.traceback
    assert "the hub refused <redacted>" in (tmp_path / "log.txt").read_text()
    assert leaks(tmp_path) == []
