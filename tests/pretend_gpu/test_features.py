# SPDX-License-Identifier: Apache-2.0
"""Single features on pretend GPUs: packed sequences, graphs, experts' exchanges beside computation, sharding strategies,
distillation, a start from released weights."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed.fsdp import CPUOffloadPolicy

import nemo2
from nemo2.base.backend.extras import have_te
from nemo2.config import Config
from support.pretend_gpu import runs
from support.pretend_gpu.runs import CPU, ONE

pytestmark = [pytest.mark.pretend_gpu, pytest.mark.timeout(280)]
NAME = "llama3_8b"
Run = Callable[..., dict[str, Any]]


def test_packed_sequences_train(run, tmp_path):
    for split in ("training", "validation", "test"):
        lines = [json.dumps({"input": f"{number} times two is", "output": f"{2 * number}"}) for number in range(40)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    overrides = [
        "data=FineTuningDataModule",
        f"data.dataset_root={tmp_path}",
        "data.tokenizer=ByteTokenizer",
        "data.seq_length=64",
        "data.global_batch_size=2",
        "data.micro_batch_size=1",
        "data.num_workers=0",
        "data.packed_sequence_specs=PackedSequenceSpecs",
        "data.packed_sequence_specs.packed_sequence_size=64",
        *ONE,
        "trainer.devices=2",
    ]
    losses = {}
    for name, env in {"gpu": None, "cpu": CPU}.items():
        record = run(runs.train, 2, str(tmp_path / name), NAME, overrides=overrides, env=env, save=False)
        losses[name] = record["losses"]
    assert len(losses["gpu"]) == runs.STEPS


@pytest.mark.parametrize("graphs", ["local", "full_iteration"])
def test_graphs_train_as_without(run, tmp_path, graphs):
    overrides = [*ONE, "trainer.devices=1", "strategy.ddp_config.check_for_nan_in_grad=False"]
    captured = [f"model.config.cuda_graph_impl={graphs}", "model.config.cuda_graph_warmup_steps=1"]
    plain, replayed = (
        run(runs.train, 1, str(tmp_path), NAME, steps=4, overrides=[*overrides, *more], save=False)
        for more in ([], captured)
    )
    assert replayed["losses"] == pytest.approx(plain["losses"], rel=1e-4)


def test_a_captured_step_of_a_pipeline_trains_as_without(run, tmp_path):
    stages = ["strategy.pipeline_model_parallel_size=2", "trainer.devices=2"]
    overrides = [*ONE, *stages, "strategy.ddp_config.check_for_nan_in_grad=False"]
    captured = ["model.config.cuda_graph_impl=full_iteration", "model.config.cuda_graph_warmup_steps=1"]
    plain, replayed = (
        run(runs.train, 2, str(tmp_path), NAME, steps=4, overrides=[*overrides, *more], save=False)
        for more in ([], captured)
    )
    assert replayed["losses"] == pytest.approx(plain["losses"], rel=1e-4)
    assert replayed["norms"] == pytest.approx(plain["norms"], rel=1e-3)


@pytest.mark.skipif(not have_te(), reason="MXFP8 is Transformer Engine's")
def test_mxfp8_parameters_that_are_gathered_in_the_forward_train_as_bf16(run, tmp_path):
    blackwell = {"PRETEND_GPU_CC": "100"}
    overrides = [*ONE, "trainer.devices=2"]
    plain, eighth = (
        run(runs.train, 2, str(tmp_path), NAME, overrides=[*overrides, *more], save=False, env=blackwell)
        for more in ([], ["trainer.plugins=bf16_with_mxfp8_mixed"])
    )
    assert eighth["losses"] == pytest.approx(plain["losses"], rel=1e-3)
    assert eighth["norms"] == pytest.approx(plain["norms"], rel=2e-3)  # weights of zeros differ by 2e-2


def bound_devices() -> list[str]:
    """The GPUs that a rank of Fabric touches, which were to be the second alone."""
    import torch

    from support import small_runs

    bound, bind = [], torch.cuda.set_device
    torch.cuda.set_device = lambda device: (bound.append(str(device)), bind(device))[1]
    fabric = nemo2.Fabric(strategy=nemo2.FabricMegatronStrategy(), devices=[1], accelerator="gpu")
    fabric.launch()
    chunks = fabric.setup(small_runs.build_llama())
    return [*bound, str(next(chunks.parameters()).device)]


def test_a_rank_touches_no_gpu_but_the_chosen_one(run):
    assert set(run(bound_devices, 1)) == {"cuda:1"}


def test_an_exchange_of_experts_beside_computation_trains_the_same(run, tmp_path):
    overlapped = ["model.config.overlap_moe_expert_parallel_comm=True"]
    name, overrides = "mixtral_8x7b", ["model.config.moe_token_dispatcher_type=alltoall"]
    world = runs.shrunk(name).processes
    plain, beside = (
        run(runs.train, world, str(tmp_path), name, overrides=[*overrides, *more], save=False)
        for more in ([], overlapped)
    )
    assert beside["losses"] == pytest.approx(plain["losses"], rel=1e-3)


@pytest.fixture(scope="module")
def released(run: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A checkpoint of a run on one pretend GPU, and its weights as a release."""
    folder = tmp_path_factory.mktemp("saved")
    run(runs.train, 1, str(folder), NAME, overrides=[*ONE, "trainer.devices=1"])
    assert "refused" not in str(run(runs.exported, 1, str(folder), str(folder / "hf")))
    return str(runs.checkpoint_of(str(folder))), f"hf://{folder / 'hf'}"


def test_a_run_from_released_weights_learns_its_teacher_as_on_a_cpu(run, released, tmp_path):
    teacher, weights = released
    overrides, known = [*ONE, "trainer.devices=1"], {"weights": weights, "save": False}
    gpu, cpu, plain = (
        run(runs.train, 1, str(tmp_path), NAME, overrides=overrides, env=env, teacher=one, **known)["losses"]
        for env, one in ((None, teacher), (CPU, teacher), (None, None))
    )
    assert gpu[0] == pytest.approx(0, abs=1e-4) and gpu == pytest.approx(cpu, abs=1e-4)  # teacher and student are one
    assert plain[0] > 1


@pytest.mark.parametrize(
    ("strategy", "overrides"),
    [
        (Config(nemo2.FSDP2Strategy), []),
        (Config(nemo2.FSDPStrategy), []),
        (None, [*ONE, "strategy.fsdp=megatron"]),
    ],  # the recipe's averages gradients
)
def test_a_strategy_that_shards_trains_as_on_cpus(run, released, tmp_path, strategy, overrides):
    known = {"weights": released[1], "save": False, "strategy": strategy}
    gpu, cpu = (
        run(runs.train, 2, str(tmp_path), NAME, overrides=[*overrides, "trainer.devices=2"], env=env, **known)["losses"]
        for env in (None, CPU)
    )
    assert len(gpu) == runs.STEPS and gpu == pytest.approx(cpu, rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "offloading"),
    [(nemo2.FSDP2Strategy, {"offload_policy": Config(CPUOffloadPolicy)}), (nemo2.FSDPStrategy, {"cpu_offload": True})],
)
def test_shards_in_host_memory_change_no_number(run, tmp_path, kind, offloading):
    plain, offloaded = (
        run(runs.train, 2, str(tmp_path), NAME, overrides=["trainer.devices=2"], save=False, strategy=strategy)
        for strategy in (Config(kind), Config(kind, **offloading))
    )
    assert len(plain["norms"]) == runs.STEPS  # of two micro-batches each
    assert offloaded["norms"] == pytest.approx(plain["norms"], rel=1e-5)
    assert offloaded["losses"] == pytest.approx(plain["losses"], rel=1e-6)


IN_HOST_MEMORY = ["optim.config.optimizer_cpu_offload=True", "optim.config.use_precision_aware_optimizer=True"]
REMAINDERS = ["optim.config.use_precision_aware_optimizer=True"]
"""Transformer Engine's Adam keeps of a main parameter what the parameter lacks."""


@pytest.mark.parametrize(
    "settings",
    [
        [*IN_HOST_MEMORY, "optim.config.optimizer_offload_fraction=0.5"],
        [*IN_HOST_MEMORY, "optim.config.optimizer_offload_fraction=1.0"],
        *([REMAINDERS, [*REMAINDERS, "strategy.ckpt_parallel_save_optim=False"]] if have_te() else []),
    ],
)
def test_a_run_with_its_own_form_of_optimizer_state_goes_on_from_its_checkpoint(run, tmp_path, settings):
    devices = 1 if settings[0] in IN_HOST_MEMORY[:1] else 2
    overrides = [*ONE, f"trainer.devices={devices}", *settings]
    whole = run(runs.train, devices, str(tmp_path / "whole"), NAME, steps=4, overrides=overrides, save=False)["losses"]
    saving = [*overrides, "log.ckpt.save_optim_on_train_end=True"]
    first, rest = (
        run(runs.train, devices, str(tmp_path), NAME, steps=steps, overrides=saving)["losses"] for steps in (2, 4)
    )
    assert [*first, *rest] == pytest.approx(whole, rel=1e-6)
