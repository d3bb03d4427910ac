# SPDX-License-Identifier: Apache-2.0
"""The recipe through nemo-run itself: its checks, its dry run, its direct run and a run in another process."""

import gc
import json
import logging
from datetime import timedelta
from pathlib import Path

import nemo_run as run
import pytest
import torch

from nemo2.base.errors import ConfigError
from nemo2.config import Config, Partial
from support.config_samples import DDP, BigModel, Callback, Plain, Strategy, recipe, write_result


def task(path):
    config = Partial(write_result, model=Config(BigModel, layers=5, dtype=torch.bfloat16), path=path)
    config.pause = timedelta(minutes=2)
    config.acts = [torch.tanh, torch.nn.functional.gelu]
    config.callbacks = [Config(Callback, every=2), Callback(every=3), run.Config(Callback, every=4)]
    return config


@pytest.fixture(autouse=True)
def experiments_are_gone():
    """nemo-run's experiments take the root logger's handlers away when they are created and one more when they are
    garbage-collected, which would be in a later test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    gc.collect()
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.slow
def test_a_task_runs_in_another_process(tmp_path, warm_interpreter):
    """nemo-run starts the ``python`` that it finds on PATH."""
    result = tmp_path / "result.json"
    executor = run.LocalExecutor(env_vars={"PYTHONPATH": str(Path(__file__).parents[3])})
    with run.Experiment("config", base_dir=str(tmp_path / "runs")) as experiment:
        experiment.add(task(result), executor=executor, name="one")
        experiment.run(sequential=True, detach=False)
    assert json.loads(result.read_text()) == {
        "model": [5, "torch.bfloat16"],
        "every": [2, 3, 4],
        "pause": 120.0,
        "acts": [0.7616, 0.8413],
    }
    (readable,) = (tmp_path / "runs").rglob("one_config.yaml")
    assert "_target_: support.config_samples.write_result" in readable.read_text()


def test_a_task_runs_directly(tmp_path):
    result = tmp_path / "result.json"
    run.run(task(result), direct=True)
    assert json.loads(result.read_text())["every"] == [2, 3, 4]


def test_a_dry_run_shows_the_arguments(tmp_path, capsys):
    run.run(recipe(), dryrun=True)
    assert "tensor_parallel=2" in capsys.readouterr().out.replace("\n", "")


def test_nemo_runs_own_check_passes_what_it_should_and_no_more(tmp_path):
    with run.Experiment("check", base_dir=str(tmp_path)) as experiment:
        experiment._validate_task("good", task(tmp_path))
        bad = task(tmp_path)
        changed = Callback()
        changed.every = 7
        bad.callbacks.append(changed)
        with pytest.raises(ConfigError, match="every=7"):
            experiment.add(bad, executor=run.LocalExecutor())
        worse = task(tmp_path)
        worse.model = Plain()
        with pytest.raises(Exception, match="Plain"):
            experiment.add(worse, executor=run.LocalExecutor())


def test_nemo_runs_own_config_of_our_class_knows_its_names():
    with pytest.raises(TypeError, match="Callback has no parameter 'evry'; did you mean 'every'"):
        run.Config(Callback, evry=2)
    ddp = run.Config(DDP, overlap_grad_sync=False)
    assert run.Config(Strategy, ddp_config=ddp).__arguments__ == {"ddp": ddp}
    assert ddp.__arguments__ == {"overlap_grad_reduce": False}
