# SPDX-License-Identifier: Apache-2.0
"""Runs as TrainJobs of Kubeflow: manifests by Kubeflow's own schema, and pods that train. ``make test-engines`` runs it."""

import hashlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo2.base.errors import ConfigError
from nemo2.config import Config
from nemo2.data import PreTrainingDataModule
from nemo2.launch import RankFailure, launch
from nemo2.launch.kubeflow.run import job_name
from nemo2.recipes import llama_tiny
from nemo2.training.run_dir.records import read_metrics

sys.path.insert(0, str(Path(__file__).parent))
from kubernetes_server import NEW, OLD, Cluster, lost

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]
STEPS = 12

MANY = [f"/data/{hashlib.sha256(bytes([n % 256, n // 256])).hexdigest()}" for n in range(3000)]
_AWKWARD = "a b; touch ran $(id) 'one' \"two\"\nsecond line \\n ${HOME}"


@pytest.fixture
def cluster_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Cluster]]:
    started: list[Cluster] = []

    def start(**arguments: Any) -> Cluster:
        folder = tmp_path / "cluster"
        folder.mkdir()
        started.append(Cluster(folder, **arguments))
        # The client reads KUBECONFIG once, as it is imported.
        place = "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION"
        monkeypatch.setattr(place, str(started[0].kubeconfig()))
        return started[0]

    yield start
    for one in started:
        one.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of two ranks of this machine."""
    place = tmp_path_factory.mktemp("undisturbed")
    launch(recipe_of(place), devices=2)
    return losses(place)


def executor_of(volume: Path, **arguments: Any) -> Any:
    import nemo_run

    mounts = {
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
        "volume_mounts": [{"name": "data", "mountPath": str(volume)}],
    }
    given = {"image": "registry/nemo2:1", "namespace": "research", **mounts, **arguments}
    return nemo_run.KubeflowExecutor(launcher="torchrun", **given)


def recipe_of(volume: Path) -> Any:
    recipe = llama_tiny.pretrain_recipe(dir=str(volume / "runs"), name="kube")
    recipe.trainer.max_steps, recipe.trainer.log_every_n_steps = STEPS, 1
    recipe.trainer.val_check_interval, recipe.trainer.limit_val_batches = STEPS, 0
    recipe.log.ckpt.every_n_train_steps = 100
    recipe.trainer.callbacks = []
    recipe.trainer.strategy.tensor_model_parallel_size, recipe.trainer.strategy.sequence_parallel = 1, False
    return recipe


def losses(volume: Path) -> dict[int, float]:
    [metrics] = (volume / "runs").rglob("metrics.jsonl")
    return {row["step"]: row["loss"] for row in read_metrics(metrics) if "loss" in row}


def printed(capsys: pytest.CaptureFixture[str], recipe: Any, executor: Any, **arguments: Any) -> dict[str, Any]:
    capsys.readouterr()
    launch(recipe, executor, dryrun=True, **arguments)
    return yaml.safe_load(capsys.readouterr().out)


def test_the_manifest_says_all_in_fields_that_kubeflow_has(
    cluster_of: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = cluster_of()
    settings = {
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "image_pull_secrets": ["registry"],
        "pod_labels": {"team": "research"},
        "gpus_per_node": 8,
    }
    recipe = recipe_of(tmp_path)
    body = printed(capsys, recipe, executor_of(tmp_path, **settings), nodes=2, devices=1, env={"NOTE": _AWKWARD})
    assert cluster.unknown_field(body) is None
    trainer = body["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 1)
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == "1"
    assert {"name": "NOTE", "value": _AWKWARD} in trainer["env"]
    [patch] = body["spec"]["runtimePatches"]
    [job] = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]
    assert pod["metadata"]["labels"] == {"team": "research"}
    assert [one["name"] for one in pod["spec"]["volumes"]] == ["data", "nemo2-shared-memory"]
    assert pod["spec"]["tolerations"] == settings["tolerations"]
    assert pod["spec"]["terminationGracePeriodSeconds"] == 600
    assert not cluster.jobs, "a dry run submits nothing"
    # Why nemo-run's own is not enough: the server would drop its volumes.
    own = executor_of(tmp_path).get_job_body("x", ["true"])
    assert cluster.unknown_field(own) == f"spec.{OLD}"


def test_two_pods_train_as_two_ranks_here(
    cluster_of: Any, undisturbed: dict[int, float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = cluster_of()
    result = launch(recipe_of(tmp_path), executor_of(tmp_path), nodes=2, devices=1, env={"NOTE": _AWKWARD})
    assert (result.status, result.exit_code) == ("succeeded", 0)
    assert f"iteration {STEPS - 1}/{STEPS - 1}" in capsys.readouterr().out
    assert [pod.variables["NOTE"] for pod in cluster.pods] == [_AWKWARD] * 2
    assert losses(tmp_path) == undisturbed
    [kept] = (tmp_path / "runs").rglob("recipe.json")
    assert '"kube"' in kept.read_text()


def test_an_older_trainer_gets_the_form_that_it_knows(cluster_of: Any, tmp_path: Path) -> None:
    cluster = cluster_of(form=OLD)
    result = launch(recipe_of(tmp_path), executor_of(tmp_path), nodes=1, devices=1, detach=True)
    assert result.status == "submitted"
    assert cluster.refused == [f"spec.{NEW}"]
    [body] = cluster.jobs.values()
    [override] = body["spec"][OLD]
    assert override["spec"]["containers"][0]["volumeMounts"][0]["mountPath"] == str(tmp_path)


def test_pods_that_are_evicted_save_and_go_on(cluster_of: Any, undisturbed: dict[int, float], tmp_path: Path) -> None:
    cluster = cluster_of(restarts=1)
    recipe = recipe_of(tmp_path)

    def evict() -> None:
        until = time.monotonic() + 120
        while time.monotonic() < until:
            if cluster.pods and "iteration 3/" in cluster.pods[0].log.read_text(errors="replace"):
                return cluster.evict()
            time.sleep(0.05)

    thread = threading.Thread(target=evict)
    thread.start()
    result = launch(recipe, executor_of(tmp_path), nodes=2, devices=1)
    thread.join()
    assert result.status == "succeeded"
    assert [pod.restarts for pod in cluster.pods] == [1, 1]
    assert losses(tmp_path) == undisturbed


def test_the_first_error_of_all_pods_is_raised(cluster_of: Any, tmp_path: Path) -> None:
    cluster_of()
    recipe = recipe_of(tmp_path)
    recipe.data.directory = "/proc/nothing"
    with pytest.raises(RankFailure) as raised:
        launch(recipe, executor_of(tmp_path), nodes=2, devices=1, check=False)
    assert raised.value.rank in (0, 1)
    assert "/proc/nothing" in str(raised.value) and "kubectl logs" in str(raised.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda recipe, given: given.update(image=""), "image"),
        (lambda recipe, given: setattr(recipe.log, "log_dir", "/elsewhere"), "log.log_dir='/elsewhere'"),
        (lambda recipe, given: setattr(recipe.log, "log_dir", None), "/runs"),
        (lambda recipe, given: setattr(recipe, "data", Config(PreTrainingDataModule, paths=MANY)), "can have only 120"),
    ],
)
def test_what_would_be_lost_or_not_arrive_is_refused_here(
    change: Any, words: str, cluster_of: Any, tmp_path: Path
) -> None:
    cluster_of()
    recipe, given = recipe_of(tmp_path), {}
    change(recipe, given)
    with pytest.raises(ConfigError, match=words):
        launch(recipe, executor_of(tmp_path, **given), nodes=1, devices=1, dryrun=True, check=False)


@pytest.mark.parametrize(
    "given",
    [
        {"pod_spec_overrides": {"volumes": []}},
        {"container_kwargs": {"env": []}},
        {"container_kwargs": {"numProcPerNode": 4}},
        {"spec_kwargs": {"trainer": {}}},
    ],
)
def test_no_extra_field_replaces_a_part_of_the_manifest(cluster_of: Any, tmp_path: Path, given: dict[str, Any]) -> None:
    cluster_of()
    [field] = given
    with pytest.raises(ConfigError, match=f"KubeflowExecutor.{field} would replace {next(iter(given[field]))}"):
        launch(recipe_of(tmp_path), executor_of(tmp_path, **given), nodes=1, devices=1, dryrun=True, check=False)


def test_launchers_that_pods_dont_start_are_refused(cluster_of: Any, tmp_path: Path) -> None:
    from nemo_run.core.execution.launcher import FaultTolerance, Torchrun

    cluster_of()
    for launcher in (FaultTolerance(), Torchrun(nsys_profile=True)):
        executor = executor_of(tmp_path)
        executor.launcher = launcher
        with pytest.raises(ConfigError, match="KubeflowExecutor.launcher="):
            launch(recipe_of(tmp_path), executor, nodes=1, devices=1, dryrun=True, check=False)


def test_secrets_are_left_to_the_cluster(cluster_of: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster_of()
    launch(
        recipe_of(tmp_path), executor_of(tmp_path), nodes=1, devices=1, dryrun=True, env={"WANDB_API_KEY": "planted"}
    )
    said = capsys.readouterr()
    assert "planted" not in said.out + said.err
    assert "WANDB_API_KEY" in said.err and "secretKeyRef" in said.err


def test_a_cluster_that_is_away_or_refuses_is_one_sentence(
    cluster_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = cluster_of()
    monkeypatch.setattr(cluster, "unknown_field", lambda body: "spec.trainer.image")
    with pytest.raises(ConfigError, match=r'unknown field "spec.trainer.image"'):
        launch(recipe_of(tmp_path), executor_of(tmp_path), nodes=1, devices=1)
    file = Path(cluster.kubeconfig())
    file.write_text(file.read_text().replace("http://127.0.0.1:", "http://127.0.0.1:1"))
    with pytest.raises(ConfigError, match="cannot be reached"):
        launch(recipe_of(tmp_path), executor_of(tmp_path), nodes=1, devices=1)


def test_names_are_those_that_kubernetes_takes() -> None:
    for name in ("Llama_3.8B", "3x", "a" * 80, "-"):
        made = job_name(name.replace("-", "x-"), "x_1795397144397610597")
        assert len(made) <= 33 and made[0].isalpha() and made == made.lower()
        assert made.endswith("-4397610597") and not set(made) - set("abcdefghijklmnopqrstuvwxyz0123456789-")


def test_a_field_that_is_dropped_is_found() -> None:
    assert lost({"a": [{"b": 1, "c": 2}]}, {"a": [{"b": 1}]}) == "a[0].c"
    assert lost({"a": 1}, {"a": 1}) is None
