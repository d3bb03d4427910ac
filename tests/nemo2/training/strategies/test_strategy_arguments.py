# SPDX-License-Identifier: Apache-2.0
"""Arguments of `MegatronStrategy` that have no tests elsewhere: what each changes in a real run, or its refusal."""

import contextlib
import inspect
import io
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch import nn
from torch.utils.data import DataLoader

import nemo2 as nl
from nemo2 import llm
from nemo2.base.errors import ConfigError
from nemo2.checkpoint.io import MegatronCheckpointIO
from nemo2.checkpoint.model_checkpoint import ModelCheckpoint
from nemo2.training.run_dir.progress_line import parse_line
from support import small_runs
from support.nightly import each_case, requested

STAGES: dict[str, dict[str, Any]] = {
    "num_layers_in_first_pipeline_stage": {"num_layers_in_first_pipeline_stage": 1},
    "num_layers_in_last_pipeline_stage": {"num_layers_in_last_pipeline_stage": 1},
    "account_for_embedding_in_pipeline_split": {"account_for_embedding_in_pipeline_split": True},
    "account_for_loss_in_pipeline_split": {"account_for_loss_in_pipeline_split": True},
    "pipeline_model_parallel_layout": {"pipeline_model_parallel_layout": "Et|ttL"},
}
"""Ways to lay three layers over two stages."""
OF_NCCL: dict[str, Any] = {
    "use_sharp": True,
    "nccl_communicator_config_path": "~/nccl.yaml",
    "pipeline_model_parallel_comm_backend": "nccl",
}


class Environment(TorchElasticEnvironment):
    """The user's own."""


class Listening(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@contextlib.contextmanager
def heard(name: str) -> Any:
    listening, logger = Listening(), logging.getLogger(name)
    level = logger.level
    logger.addHandler(listening)
    logger.setLevel(logging.INFO)
    try:
        yield listening.said
    finally:
        logger.removeHandler(listening)
        logger.setLevel(level)


def fit(layers: int = 2, *, distributed: bool = False, **options: Any) -> dict[str, Any]:
    """A short run, after which another one may be laid out otherwise."""
    try:
        return small_runs.fit(
            small_runs.build_llama(num_layers=layers, distributed=distributed), **{"max_steps": 1, **options}
        )
    finally:
        small_runs.release()


def layers_of(trainer: Any) -> int:
    return sum(len(chunk.decoder.layers) for chunk in trainer.strategy.megatron_parallel.unwrapped)


class Chunks(pl.Callback):
    """The order in which this rank's chunks go forward."""

    def __init__(self) -> None:
        self.order: list[int] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for index, chunk in enumerate(trainer.strategy.megatron_parallel):
            chunk.register_forward_pre_hook(lambda *_, index=index: self.order.append(index))


def chunks_in_order(**options: Any) -> tuple[list[int], list[float]]:
    chunks = Chunks()
    run = fit(4, callbacks=[chunks], pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, **options)
    return chunks.order, run["losses"]


def refused(**options: Any) -> str:
    try:
        small_runs.fit(small_runs.build_llama(), max_steps=1, **options)
    except ConfigError as error:
        return str(error)
    return "ran"


def groups_of_others() -> dict[str, Any]:
    """Runs over groups that somebody else has made, or nobody."""
    two = {"tensor_model_parallel_size": 2}
    found: dict[str, Any] = {"own": fit(**two)["losses"]}
    found["nobody's"] = refused(init_model_parallel=False, **two)
    parallel_state.initialize_model_parallel(**two)
    group = parallel_state.get_tensor_model_parallel_group()
    found["of another layout"] = refused(init_model_parallel=False)
    found["of another layout, and not told of"] = refused()
    found["given"] = small_runs.fit(small_runs.build_llama(), max_steps=1, init_model_parallel=False, **two)["losses"]
    found["kept"] = parallel_state.get_tensor_model_parallel_group() is group
    small_runs.release()
    return found


def one_layout_after_the_other() -> dict[str, Any]:
    """Two trainers of one process: the groups of the second are those of its layout."""
    first = small_runs.fit(small_runs.build_llama(), max_steps=1, tensor_model_parallel_size=2)
    sizes = [parallel_state.get_tensor_model_parallel_world_size()]
    second = small_runs.fit(small_runs.build_llama(), max_steps=1)
    sizes.append(parallel_state.get_tensor_model_parallel_world_size())
    group = parallel_state.get_tensor_model_parallel_group()
    small_runs.fit(small_runs.build_llama(), max_steps=1)
    same = parallel_state.get_tensor_model_parallel_group() is group
    small_runs.release()
    return {"sizes": sizes, "same": same, "losses": (first["losses"], second["losses"]), "alone": fit()["losses"]}


class UpdatesItself(llm.LlamaModel):
    """Plain gradient descent, written by the user."""

    automatic_optimization = False

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        self.done: list[tuple[int, float]] = getattr(self, "done", [])
        self.done.append((self.trainer.global_step, float(strategy.last_loss)))
        with torch.no_grad():
            for parameter in strategy.megatron_parallel.parameters():
                parameter -= 0.5 * parameter.main_grad


def without_optimizers() -> dict[str, Any]:
    model = UpdatesItself(small_runs.build_llama().config)
    trainer = small_runs.build_trainer(max_steps=3, setup_optimizers=False)
    trainer.fit(model, small_runs.TokenData())
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    small_runs.release()
    found = {"done": model.done, "logged": logged, "steps": trainer.global_step}
    return found | {"left to Lightning": refused(setup_optimizers=False, tensor_model_parallel_size=2)}


def timed(log_level: int) -> list[str]:
    with heard("nemo2.training.strategies.metrics") as said:
        fit(max_steps=2, pipeline_model_parallel_size=2, megatron_log_level=log_level)
    return said


def of_nccl() -> tuple[list[float], list[float], list[str]]:
    small_runs.quiet()
    plain = fit(pipeline_model_parallel_size=2)["losses"]
    with heard("nemo2.config.notices") as said:
        return plain, fit(pipeline_model_parallel_size=2, **OF_NCCL)["losses"], said


def devices_and_places() -> dict[str, Any]:
    """With a loader that knows nothing of batches, which the strategy's sampler cuts."""
    given: dict[str, Any] = {
        "cluster_environment": Environment(),
        "parallel_devices": small_runs.devices(2),
        "checkpoint_io": MegatronCheckpointIO(),
        "data_sampler": small_runs.TokenData().data_sampler,
    }
    run = fit(
        data=DataLoader(small_runs.Tokens()),
        inspect=lambda trainer: [name for name in given if getattr(trainer.strategy, name) is not given[name]],
        **given,
    )
    return {"taken": run["inspected"], "losses": run["losses"]}


class Messages(pl.Callback):
    """The dtype in which the first stage sends, and the second one receives."""

    def __init__(self) -> None:
        self.dtypes: set[torch.dtype] = set()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        [core] = trainer.strategy.megatron_parallel.unwrapped
        take = core.set_input_tensor

        def noted(given: Any) -> Any:
            self.dtypes |= {one.dtype for one in (given if isinstance(given, list) else [given]) if one is not None}
            return take(given)

        core.set_input_tensor = noted
        if core.pre_process:
            core.register_forward_hook(lambda *_: self.dtypes.add(_[2].dtype))


def messages() -> dict[str, Any]:
    def run(precision: str, config: dict[str, Any] | None = None, **given: Any) -> Any:
        seen = Messages()
        model = small_runs.build_llama(**(config or {}))
        try:
            small_runs.fit(
                model, max_steps=1, precision=precision, callbacks=[seen], pipeline_model_parallel_size=2, **given
            )
        except ConfigError as error:
            return str(error)
        finally:
            small_runs.release()
        return seen.dtypes

    return {
        "bf16": run("bf16-mixed", pipeline_dtype=torch.bfloat16),
        "fp32 between layers": run("bf16-mixed", {"fp32_residual_connection": True}),
        "fp32 asked for": run("bf16-mixed", pipeline_dtype=torch.float32),
        "bf16 asked for": run("32", pipeline_dtype=torch.bfloat16),
    }


def on_two_ranks(stages: list[str]) -> dict[str, Any]:
    small_runs.quiet()
    two = {"pipeline_model_parallel_size": 2}
    return {
        "stages": {name: fit(3, inspect=layers_of, **two, **STAGES[name])["inspected"] for name in stages},
        "chunks": chunks_in_order(),
        "chunks of four": chunks_in_order(microbatch_group_size_per_vp_stage=4),
        "groups": groups_of_others(),
        "layouts": one_layout_after_the_other(),
        "no optimizer": without_optimizers(),
        "timers": [timed(level) for level in (0, 1, 2)],
        "devices": devices_and_places(),
        "dtypes": messages(),
        "gloo": fit(distributed=True, inspect=lambda _: _gloo_group())["inspected"],
        "no gloo": fit(distributed=True, inspect=lambda _: _gloo_group(), use_gloo_process_groups=False)["inspected"],
    }


def _gloo_group() -> bool:
    try:
        return parallel_state.get_data_parallel_group_gloo() is not None
    except AssertionError:
        return False


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, run_on_ranks: Any) -> list[dict[str, Any]]:
    return run_on_ranks(on_two_ranks, 2, requested(request, "name"), timeout=600.0)


@pytest.mark.parametrize(
    "name", each_case(STAGES, ("num_layers_in_first_pipeline_stage", "pipeline_model_parallel_layout"))
)
def test_stages_hold_the_layers_that_were_asked_for(ranks: list[dict[str, Any]], name: str) -> None:
    uneven = [2, 1] if "last" in name or "loss" in name else [1, 2]
    assert [found["stages"][name] for found in ranks] == uneven


def test_a_virtual_stage_runs_as_many_micro_batches_in_a_row_as_asked_for(ranks: list[dict[str, Any]]) -> None:
    order, losses = ranks[0]["chunks"]
    in_fours, same = ranks[0]["chunks of four"]
    assert order == [0, 0, 1, 1] * 2 and in_fours == [0] * 4 + [1] * 4, "microbatch_group_size_per_vp_stage"
    assert losses == same


def test_groups_that_somebody_else_has_made_are_used_and_compared(ranks: list[dict[str, Any]]) -> None:
    found = ranks[0]["groups"]
    assert found["given"] == found["own"] and found["kept"], "init_model_parallel=False"
    assert "strategy.init_model_parallel=False, but Megatron-Core's process groups don't exist" in found["nobody's"]
    for case in ("of another layout", "of another layout, and not told of"):
        assert "strategy.tensor_model_parallel_size=1 contradicts Megatron-Core's existing" in found[case]
        assert "which have tensor_model_parallel_size=2" in found[case]


def test_a_second_trainer_gets_the_groups_of_its_own_layout(ranks: list[dict[str, Any]]) -> None:
    found = ranks[0]["layouts"]
    assert found["sizes"] == [2, 1] and found["same"]
    assert found["losses"][1] == found["alone"] != found["losses"][0]


def test_a_module_may_do_its_own_updates(ranks: list[dict[str, Any]]) -> None:
    found = ranks[0]["no optimizer"]
    assert [step for step, _ in found["done"]] == [1, 2, 3] and found["steps"] == 3, "setup_optimizers=False"
    losses = [loss for _, loss in found["done"]]
    assert losses == [found["done"][index][1] for index in range(3)] and len(set(losses)) == 3
    assert found["logged"]["reduced_train_loss"] == pytest.approx(losses[-1])
    assert found["logged"]["consumed_samples"] == 3 * small_runs.GBS and "lr" not in found["logged"]
    assert found["left to Lightning"].startswith(
        "strategy.setup_optimizers=False: LlamaModel uses Lightning's automatic"
    )


def test_megatron_cores_timers_are_told_up_to_the_level(ranks: list[dict[str, Any]]) -> None:
    none, whole, each = ranks[0]["timers"]
    assert none == [] and len(whole) == len(each) == 2, "megatron_log_level, at each of two steps that are logged"
    assert all("forward-backward" in said and "forward-compute" not in said for said in whole)
    assert all("forward-backward" in said and "forward-compute" in said for said in each)
    assert "Up to step 2, (min, max) time across ranks (ms)" in each[1]
    assert ranks[1]["timers"] == [[], [], []]


def test_what_is_of_nccl_is_set_aside_on_cpus_and_said(run_on_ranks: Any) -> None:
    (plain, losses, said), (*_, elsewhere) = run_on_ranks(of_nccl, 2, env={"CUDA_VISIBLE_DEVICES": ""})
    assert losses == plain
    [told] = [one for one in said if "gloo" in one]
    for name in OF_NCCL:
        assert f"strategy.{name}=" in told
    assert elsewhere == []


def test_on_gpus_megatron_core_is_given_what_was_asked_for() -> None:
    from nemo2.base.backend.cuda import CudaBackend

    given = nl.MegatronStrategy(**OF_NCCL, use_gloo_process_groups=False, use_tp_pp_dp_mapping=True)._options_of_groups(
        CudaBackend()
    )
    assert given["use_sharp"] and given["pipeline_model_parallel_comm_backend"] == "nccl"
    assert given["nccl_communicator_config_path"] == str(Path.home() / "nccl.yaml")
    assert given["create_gloo_process_groups"] is False and given["order"] == "tp-cp-ep-pp-dp"
    assert given.keys() <= inspect.signature(parallel_state.initialize_model_parallel).parameters.keys()


def test_stages_send_activations_as_they_are(ranks: list[dict[str, Any]]) -> None:
    told = [found["dtypes"] for found in ranks]
    assert told[0]["bf16"] == told[1]["bf16"] == {torch.bfloat16}
    assert told[0]["fp32 between layers"] == told[1]["fp32 between layers"] != set()
    for found in told:
        assert (
            "strategy.pipeline_dtype=torch.float32: activations between layers are torch.bf" in found["fp32 asked for"]
        )
        assert (
            "strategy.pipeline_dtype=torch.bfloat16: activations between layers are torch.f" in found["bf16 asked for"]
        )


def test_devices_environment_writer_and_sampler_are_the_users(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["devices"]["taken"] == [], "others than were given"
        assert found["devices"]["losses"] == found["layouts"]["alone"]


def test_gloo_groups_are_made_unless_they_are_not_wanted(ranks: list[dict[str, Any]]) -> None:
    assert [(found["gloo"], found["no gloo"]) for found in ranks] == [(True, False)] * 2, "use_gloo_process_groups"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"pipeline_model_parallel_comm_backend": "gloo"}, r"backend='gloo': must be None, 'nccl' or 'ucc'\."),
        ({"megatron_log_level": 3}, r"megatron_log_level=3: must be 0, 1 or 2\."),
        ({"ckpt_torch_dist_multiproc": 0}, "ckpt_torch_dist_multiproc=0: must be a whole number of at least 1"),
        ({"save_ckpt_format": "zarr"}, "save_ckpt_format='zarr': Megatron-Core no longer supports"),
    ],
)
def test_values_that_nothing_takes_are_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        nl.MegatronStrategy(**given)


# ------------------------------------------------------------------------------------------------------- four ranks


def on_four_ranks() -> dict[str, Any]:
    def groups(trainer: Any) -> dict[str, list[int]]:
        made = {
            "pipeline": parallel_state.get_pipeline_model_parallel_group(),
            "data": parallel_state.get_data_parallel_group(),
            "optimizer": parallel_state.get_data_parallel_group(True, partial_data_parallel=True),
        }
        return {name: torch.distributed.get_process_group_ranks(group) for name, group in made.items()}

    stages = {"pipeline_model_parallel_size": 2, "inspect": groups}
    return {
        "by default": fit(**stages)["inspected"],
        "mapped": fit(use_tp_pp_dp_mapping=True, **stages)["inspected"],
        "whole": fit(distributed=True, inspect=groups),
        "instances": fit(distributed=True, inspect=groups, num_distributed_optimizer_instances=2),
    }


def test_ranks_are_numbered_and_optimizers_sharded_as_asked_for(run_on_ranks: Any) -> None:
    first = run_on_ranks(on_four_ranks, 4)[0]
    assert first["by default"]["pipeline"] == [0, 2] and first["by default"]["data"] == [0, 1]
    assert first["mapped"]["pipeline"] == [0, 1] and first["mapped"]["data"] == [0, 2], "use_tp_pp_dp_mapping"
    whole, instances = first["whole"], first["instances"]
    assert whole["inspected"]["optimizer"] == [0, 1, 2, 3]
    assert instances["inspected"]["optimizer"] == [0, 1], "num_distributed_optimizer_instances"
    assert instances["inspected"]["data"] == [0, 1, 2, 3] and instances["losses"] == whole["losses"]


# ---------------------------------------------------------------------------------------------------------- progress


def lines(**strategy: Any) -> tuple[list[str], list[int]]:
    """Callbacks that show progress, and the steps of the lines printed."""
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(io.StringIO()):
        trainer = nl.Trainer(
            devices=1,
            max_steps=4,
            strategy=nl.MegatronStrategy(ckpt_async_save=False, **strategy),
            plugins=nl.MegatronMixedPrecision("32"),
            limit_val_batches=0,
            log_every_n_steps=1,
        )
        trainer.fit(small_runs.build_llama(), small_runs.TokenData())
    small_runs.release()
    found = (parse_line(line) for line in said.getvalue().splitlines())
    shown = [type(one).__name__ for one in trainer.callbacks if isinstance(one, pl.callbacks.ProgressBar)]
    return shown, [int(one.metrics["global_step"]) for one in found if one is not None]


def progress() -> dict[str, Any]:
    small_runs.quiet()
    return {
        "every": lines(),
        "every second": lines(progress_interval=2),
        "none": lines(progress_interval=0),
        "lightning's": lines(replace_progress_bar=False),
    }


def test_progress_is_ours_at_the_interval_or_lightnings(run_on_ranks: Any) -> None:
    [found] = run_on_ranks(progress, 1)
    assert found["every"] == (["ProgressPrinter"], [0, 1, 2, 3])
    assert found["every second"] == (["ProgressPrinter"], [1, 3]), "progress_interval"
    assert found["none"] == (["ProgressPrinter"], [])
    [shown], printed = found["lightning's"]
    assert shown in ("RichProgressBar", "TQDMProgressBar") and printed == [], "replace_progress_bar=False"


# ------------------------------------------------------------------------------------------------------- checkpoints

SAVES: dict[str, dict[str, Any]] = {
    "default": {},
    "by one replica in one file, read by each": {
        "ckpt_parallel_save": False,
        "ckpt_torch_dist_multiproc": 1,
        "ckpt_parallel_load": False,
    },
    "planned once, in the background, in three files": {
        "ckpt_assume_constant_structure": True,
        "ckpt_async_save": True,
        "ckpt_torch_dist_multiproc": 3,
    },
    "without the optimizer": {"ckpt_save_optimizer": False},
}
STEPS, STOP = 4, 2


def saved_and_resumed(path: Path, **given: Any) -> dict[str, Any]:
    """A run that saves at every step, the last time without the optimizer, and another one from a checkpoint in the middle."""
    from unittest import mock

    from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner

    plan, planned = MCoreSavePlanner.create_global_plan, []

    def count(self: Any, plans: Any) -> Any:
        planned.append(len(plans))
        return plan(self, plans)

    keeping = ModelCheckpoint(
        dirpath=str(path), every_n_train_steps=1, save_top_k=-1, filename="{step}", save_last=True, verbose=False
    )
    with mock.patch.object(MCoreSavePlanner, "create_global_plan", count):
        run = fit(distributed=True, max_steps=STEPS, callbacks=[keeping], **given)
    resumed = fit(distributed=True, max_steps=STEPS, ckpt_path=path / f"step={STOP}", **given)
    return {
        "losses": run["losses"],
        "resumed": resumed["losses"],
        "files": sorted(file.name for file in (path / f"step={STEPS - 1}" / "weights").glob("*.distcp")),
        "planned": len(planned),
    }


def saves(directory: str) -> dict[str, Any]:
    return {name: saved_and_resumed(Path(directory) / name, **given) for name, given in SAVES.items()}


@pytest.fixture(scope="module")
def saved(run_on_ranks: Any, tmp_path_factory: Any) -> dict[str, Any]:
    return run_on_ranks(saves, 2, str(tmp_path_factory.mktemp("saves")), timeout=600.0)[0]


@pytest.mark.parametrize("name", [name for name in SAVES if name != "without the optimizer"])
def test_a_run_goes_on_from_a_checkpoint_however_it_was_written(saved: dict[str, Any], name: str) -> None:
    assert saved[name]["losses"] == saved["default"]["losses"], "ckpt_parallel_save, ckpt_parallel_load"
    assert saved[name]["resumed"] == saved[name]["losses"][STOP:]


def test_without_its_optimizer_a_run_goes_on_from_the_weights(saved: dict[str, Any]) -> None:
    found = saved["without the optimizer"]
    assert found["resumed"][0] == found["losses"][STOP], "ckpt_save_optimizer"
    assert found["resumed"][1] != found["losses"][STOP + 1]


def test_files_are_as_many_and_by_whom_as_asked_for(saved: dict[str, Any]) -> None:
    def of_ranks(ranks: int, each: int) -> list[str]:
        return [f"__{rank}_{file}.distcp" for rank in range(ranks) for file in range(each)]

    files = {name: found["files"] for name, found in saved.items()}
    cores_own = inspect.signature(TorchDistSaveShardedStrategy).parameters["thread_count"].default
    assert files["default"] == of_ranks(2, cores_own)
    assert files["by one replica in one file, read by each"] == of_ranks(1, 1), "ckpt_torch_dist_multiproc"
    assert files["planned once, in the background, in three files"] == of_ranks(2, 3)


def test_a_constant_structure_is_planned_until_two_plans_are_alike(saved: dict[str, Any]) -> None:
    usual, once = saved["default"]["planned"], saved["planned once, in the background, in three files"]["planned"]
    assert once == usual - (STEPS - 2), "ckpt_assume_constant_structure"


def within_replicas(directory: str) -> dict[str, Any]:
    def bytes_of(name: str, **given: Any) -> int:
        keeping = ModelCheckpoint(
            dirpath=f"{directory}/{name}", every_n_train_steps=1, filename="{step}", save_last=False, verbose=False
        )
        fit(callbacks=[keeping], tensor_model_parallel_size=2, **given)
        rank = torch.distributed.get_rank()
        return sum(file.stat().st_size for file in Path(directory, name, "step=1", "weights").glob(f"__{rank}_*"))

    return {"world": bytes_of("world"), "within": bytes_of("within", ckpt_parallel_save_within_dp=True)}


def test_writing_is_shared_in_the_world_or_among_replicas(run_on_ranks: Any, tmp_path: Path) -> None:
    first, second = run_on_ranks(within_replicas, 2, str(tmp_path))
    # With one replica, what both tensor-parallel ranks hold is the first one's to write.
    assert first["within"] > first["world"] and second["within"] < second["world"], "ckpt_parallel_save_within_dp"


def test_arguments_of_the_checkpoint_io_reach_it() -> None:
    strategy: Any = nl.MegatronStrategy(ckpt_load_directly_on_device=False, ckpt_parallel_load=False)
    made: MegatronCheckpointIO = strategy.checkpoint_io
    assert not made.load_directly_on_device and not made.parallel_load and made.async_save


@pytest.mark.parametrize(
    ("layer", "refused"), [(nn.Linear(2, 2), False), (nn.SyncBatchNorm(2), False), (nn.BatchNorm1d(2), True)]
)
def test_batch_norms_that_nobody_synchronizes_are_refused_under_sync_batchnorm(layer: nn.Module, refused: bool) -> None:
    from nemo2.training.strategies.base import refuse_batch_norms

    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(_layer_sync=object()))
    with pytest.raises(ConfigError, match="sync_batchnorm=True") if refused else contextlib.nullcontext():
        refuse_batch_norms(trainer, [nn.Sequential(layer)])
