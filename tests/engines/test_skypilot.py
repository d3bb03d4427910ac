# SPDX-License-Identifier: Apache-2.0
"""Runs through SkyPilot: the task of a dry run by SkyPilot's own schema. ``make test-engines`` runs it."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo2.launch import launch
from nemo2.launch.clusters import resolve_executor
from nemo2.recipes import llama_tiny

pytestmark = pytest.mark.engines

PROFILES = """
[clusters.sky]
kind = "skypilot"
gpus = "H100"
infra = "k8s"
container_image = "docker:registry/nemo2:1"

[clusters.sky_jobs]
kind = "skypilot_jobs"
gpus = "H100"
container_image = "docker:registry/nemo2:1"
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nemo2.toml").write_text(PROFILES)
    # A commit is what it ships.
    commit = "git init -q; git add nemo2.toml; git -c user.name=n -c user.email=e commit -qm code"
    subprocess.run(commit, shell=True, check=True)
    return tmp_path


@pytest.mark.parametrize("profile", ["sky", "sky_jobs"])
def test_a_task_is_one_that_skypilot_takes(profile: str, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from sky.utils import common_utils, schemas

    recipe = llama_tiny.pretrain_recipe(dir="/data/runs", name="sky")
    capsys.readouterr()
    launch(recipe, profile, nodes=2, devices=2, dryrun=True, env={"NOTE": "a b; $(id)\nc"})
    text = capsys.readouterr().out.partition("\nbecause")[0]
    task: dict[str, Any] = yaml.safe_load(text)
    common_utils.validate_schema(task, schemas.get_task_schema(), "the task: ")
    assert task["num_nodes"] == 2
    assert task["resources"]["accelerators"] == {"H100": 2}
    assert task["envs"]["NOTE"] == "a b; $(id)\nc"
    assert "--nnodes 2 --nproc-per-node 2" in " ".join(task["run"].split())
    assert "/nemo_run" in task["file_mounts"]


def test_the_shape_of_a_profile_is_read_back(project: Path) -> None:
    executor, settings = resolve_executor("sky")
    assert settings is not None
    assert executor.nproc_per_node() == 1
