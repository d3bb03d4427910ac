# SPDX-License-Identifier: Apache-2.0
"""The trainer's own defaults and refusals, before anything runs."""

from typing import Any

import fiddle as fdl
import nemo_run
import pytest
import torch
from fiddle._src.experimental import serialization
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

from nemo2.base.errors import ConfigError
from nemo2.callbacks import GarbageCollectionCallback
from nemo2.config.serialize import to_json
from nemo2.mcore.precision import MegatronMixedPrecision
from nemo2.training.strategy import MegatronStrategy
from nemo2.training.trainer import Trainer, check_devices

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")


def made(**arguments: Any) -> Trainer:
    return Trainer(**{"devices": 1, "strategy": MegatronStrategy(), "enable_progress_bar": False, **arguments})


def test_with_megatron_only_what_was_asked_for_is_there():
    trainer = made()
    assert trainer.loggers == []
    assert trainer.checkpoint_callbacks == []
    assert [type(item).__name__ for item in trainer.callbacks if "Summary" in type(item).__name__] == []
    assert trainer.num_sanity_val_steps == 0


def test_an_interval_of_validation_in_steps_may_exceed_an_epoch_and_a_share_counts_within():
    assert made(val_check_interval=2000).check_val_every_n_epoch is None
    assert made(val_check_interval=0.5).check_val_every_n_epoch == 1
    assert made().check_val_every_n_epoch == 1


def test_a_run_shorter_than_its_logging_interval_logs_its_last_step():
    assert made(max_steps=3, log_every_n_steps=10).log_every_n_steps == 3
    assert made(max_steps=3).log_every_n_steps == 3
    assert made(max_steps=30, log_every_n_steps=10).log_every_n_steps == 10
    assert made(log_every_n_steps=10).log_every_n_steps == 10
    assert made(max_steps=3, log_every_n_steps=0).log_every_n_steps == 0


@pytest.mark.parametrize("is_live", [True, False])
def test_a_trainer_in_a_node_of_nemo_run_travels_as_the_user_wrote_it(is_live):
    """Lightning sets the strategy's environment and appends its callbacks. Neither is the user's."""
    callbacks = [GarbageCollectionCallback(2, 3)]
    arguments = {"max_time": "00:01:00:00", "callbacks": callbacks, "devices": 1, "enable_progress_bar": False}
    trainer = made(**arguments) if is_live else nemo_run.Config(Trainer, **arguments, strategy=MegatronStrategy())
    recipe = nemo_run.Partial(dict, trainer=trainer)
    arrived = serialization.load_json(to_json(recipe)).trainer
    assert len(callbacks) == 1
    assert {name: getattr(arrived, name) for name in arguments if name != "callbacks"}.items() <= arguments.items()
    assert [(type(one), one.gc_interval_train) for one in fdl.build(arrived.callbacks)] == [
        (GarbageCollectionCallback, 2)
    ]
    assert arrived.strategy.__fn_or_cls__ is MegatronStrategy and not arrived.strategy.__arguments__


def test_precision_by_name_is_the_megatron_plugin():
    trainer = made(precision="bf16")
    assert isinstance(trainer.precision_plugin, MegatronMixedPrecision)
    assert trainer.precision_plugin.precision == "bf16-mixed"
    with pytest.raises(ConfigError, match="trainer.precision='bf16' and a precision plugin"):
        made(precision="bf16", plugins=MegatronMixedPrecision("32"))
    with pytest.raises(ConfigError, match="precision='64-true': must be one of"):
        made(precision="64-true")


@no_gpu
def test_overfitting_does_not_validate_where_nothing_is_validated():
    found = {limit: made(overfit_batches=2, limit_val_batches=limit) for limit in (0, 4)}
    assert {limit: (one.limit_train_batches, one.limit_val_batches) for limit, one in found.items()} == {
        0: (2, 0),
        4: (2, 2),
    }


def test_switches_and_counts_are_taken_as_numbers_and_none():
    assert made(num_nodes=None).num_nodes == 1
    assert not made(detect_anomaly=None)._detect_anomaly
    before = torch.backends.cudnn.benchmark
    try:
        made(benchmark=1)
        assert torch.backends.cudnn.benchmark is True
    finally:
        torch.backends.cudnn.benchmark = before


def test_gpus_are_refused_where_there_are_none():
    with pytest.raises(ConfigError, match="trainer.accelerator='gpu': this machine has no GPU.*'auto'"):
        made(accelerator="gpu")


@no_gpu
def test_more_cpu_processes_than_were_launched_are_refused_with_the_ways_to_launch_them(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for devices, nodes in ((8, 1), (1, 2)):
        with pytest.raises(ConfigError, match=rf"trainer.devices={devices} with trainer.num_nodes={nodes}.*devices=2"):
            made(devices=devices, num_nodes=nodes)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    check_devices(accelerator="auto", devices=8, num_nodes=1)


def test_more_ranks_than_gpus_are_refused_in_a_trainer_and_in_a_launch(monkeypatch):
    from nemo2.preflight.checks.find import too_many_for_this_machine

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    for accelerator in ("auto", "gpu"):
        with pytest.raises(ConfigError, match=r"trainer\.devices=2.*trainer\.devices=1"):
            check_devices(accelerator=accelerator, devices=2, num_nodes=1)
        check_devices(accelerator=accelerator, devices=1, num_nodes=4)
    (refused,) = too_many_for_this_machine(2, 1, chosen=True)
    assert "trainer.devices=2" in refused
    assert not list(too_many_for_this_machine(1, 1, chosen=False))
    with pytest.raises(ConfigError, match=r"trainer\.devices=\[1\].*from 0 to 0"):
        check_devices(accelerator="auto", devices=[1], num_nodes=1)
    (refused,) = too_many_for_this_machine(1, 1, chosen=True, indices=[1])
    assert "trainer.devices=[1]" in refused
    assert not list(too_many_for_this_machine(1, 1, chosen=True, indices=[0]))


@no_gpu
def test_tasks_of_srun_are_launched_processes_and_a_batch_script_is_none(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    with pytest.raises(ConfigError, match="one process was started"):
        check_devices(accelerator="auto", devices=1, num_nodes=2)
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    check_devices(accelerator="auto", devices=1, num_nodes=2)


def test_a_typing_error_is_answered_with_the_nearest_name():
    with pytest.raises(ConfigError, match="max_step.*max_steps"):
        Trainer(max_step=3)  # pyright: ignore[reportCallIssue]


def test_lightnings_own_requeueing_is_off_unless_the_user_brings_it(monkeypatch):
    for name, value in {"NTASKS": "1", "PROCID": "0", "LOCALID": "0", "NODEID": "0", "JOB_NAME": "train"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)

    def requeues(**arguments):
        environment = Trainer(devices=1, **arguments)._accelerator_connector.cluster_environment
        assert isinstance(environment, SLURMEnvironment)
        return environment.auto_requeue

    assert not requeues()
    assert requeues(plugins=[SLURMEnvironment()])
