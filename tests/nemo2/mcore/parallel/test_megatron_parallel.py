# SPDX-License-Identifier: Apache-2.0
"""The step's three parts as a user's module defines them, and how batches are split."""

import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from nemo2.base.errors import ConfigError
from nemo2.mcore.parallel.megatron_parallel import MegatronParallel, default_data_step, split_batch
from support import small_runs


def test_a_batch_is_cut_along_its_first_dimension_without_copying():
    batch = {"tokens": torch.arange(12).reshape(4, 3), "pair": [torch.arange(4), "text"], "scalar": torch.tensor(7)}
    first, second = split_batch(batch, 2)
    assert first["tokens"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert second["pair"] == [pytest.approx(torch.tensor([2, 3])), "text"]
    assert first["scalar"] is batch["scalar"]
    assert second["tokens"].untyped_storage().data_ptr() == batch["tokens"].untyped_storage().data_ptr()
    assert split_batch(batch, 1)[0] is batch


def test_a_batch_that_cannot_be_cut_says_its_shape():
    with pytest.raises(ConfigError, match=r"shape \(3, 2\) can't be split into 2 micro-batches"):
        split_batch([torch.zeros(3, 2)], 2)


def overridden(calls: list[str]) -> Any:
    """A Llama whose user counts calls, halves the loss and looks at the data first."""
    from nemo2.mcore.parallel.loss import MaskedTokenLossReduction
    from nemo2.models.llama import LlamaConfig, LlamaModel

    class Halved(MaskedTokenLossReduction):
        def setup(self, batch: Any) -> None:
            calls.append("setup")

        def forward(self, batch: Any, forward_out: torch.Tensor) -> Any:
            calls.append("loss")
            return super().forward(batch, forward_out / 2)

    class Mine(LlamaModel):
        def data_step(self, dataloader_iter: Iterator[Any]) -> Any:
            calls.append("data")
            return super().data_step(dataloader_iter)

        def forward_step(self, batch: Any) -> torch.Tensor:
            calls.append("forward")
            return super().forward_step(batch)

        @property
        def training_loss_reduction(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
            return Halved()

    plain = small_runs.build_llama()
    return Mine(LlamaConfig(**small_runs.MODEL), optim=plain.optim)


def steps_of_a_module() -> dict[str, Any]:
    calls: list[str] = []
    plain = small_runs.fit(small_runs.build_llama(), max_steps=1)
    mine = small_runs.fit(overridden(calls), max_steps=1, trainer={"limit_val_batches": 1, "val_check_interval": 1})
    return {"calls": calls, "plain": plain, "mine": mine}


def test_a_modules_own_steps_are_used_micro_batch_by_micro_batch(run_on_ranks):
    found = run_on_ranks(steps_of_a_module, 1)[0]
    microbatches = small_runs.GBS // small_runs.MBS
    training = ["data", "forward", "setup", "loss"] * microbatches
    validation = ["data", "forward"] * microbatches  # its reduction is the model's own
    assert found["calls"] == training + validation
    assert found["mine"]["losses"][0] == pytest.approx(found["plain"]["losses"][0] / 2, rel=1e-6)
    assert found["mine"]["grad_norms"][0] == pytest.approx(found["plain"]["grad_norms"][0] / 2, rel=1e-5)


def virtual_stages() -> dict[str, Any]:
    """Dropout in the second chunk of each rank would make two validations of the same weights differ."""
    import lightning.pytorch as pl

    modes: list[tuple[str, list[bool]]] = []
    weights: list[float] = []

    class Modes(pl.Callback):
        def on_megatron_step_end(self, step: Any) -> None:
            if step.stage == "training":
                weights.append(float(step.pipeline.weight))

        def on_megatron_step_start(self, step: Any) -> None:
            modes.append((step.stage, sorted({m.training for core in step.pipeline.unwrapped for m in core.modules()})))

    run = small_runs.fit(
        small_runs.build_llama(num_layers=4, hidden_dropout=0.5, attention_dropout=0.5),
        max_steps=2,
        callbacks=[Modes()],
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        trainer={"limit_val_batches": 1, "val_check_interval": 1},
    )
    return {"modes": modes, "weights": weights, "messages": run["inspected"]}


def test_all_virtual_chunks_change_between_training_and_evaluation(run_on_ranks):
    for found in run_on_ranks(virtual_stages, 2):
        assert found["modes"] == [("training", [True]), ("validation", [False])] * 2
        kept = [float(small_runs.global_batch(step)["loss_mask"].sum()) for step in range(2)]
        assert found["weights"] == kept, "every stage has the tokens behind the last stage's mean"


def without_chunks() -> str:
    import lightning.pytorch as pl

    class NoChunks(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(2, 2)

        def training_step(self, batch: Any) -> torch.Tensor:
            raise AssertionError("never reached")

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    small_runs.quiet()
    trainer = small_runs.build_trainer(
        max_steps=1, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2
    )
    with pytest.raises(ConfigError) as caught:
        trainer.fit(NoChunks(), torch.utils.data.DataLoader([torch.zeros(2)] * 4))
    return str(caught.value)


def test_a_module_that_cannot_be_cut_into_virtual_stages_is_told_what_to_define(run_on_ranks):
    for message in run_on_ranks(without_chunks, 2):
        assert "virtual_pipeline_model_parallel_size=2: NoChunks must define build_chunk(vp_stage)" in message


def left_of_runs() -> tuple[list[int], list[bool]]:
    """Threads of gloo after each of three runs, and whether the first's model and optimizer are still there."""
    threads, held = [], []

    def look(trainer: Any) -> None:
        held.extend((weakref.ref(trainer.strategy.megatron_parallel.unwrapped[0]), weakref.ref(trainer.optimizers[0])))

    for _ in range(3):
        small_runs.fit(small_runs.build_llama(distributed=True), max_steps=1, inspect=look)
        small_runs.release()
        names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
        threads.append(sum("gloo" in name for name in names))
    return threads, [reference() is not None for reference in held]


def test_a_finished_run_leaves_neither_its_model_nor_its_process_groups(run_on_ranks):
    for threads, held in run_on_ranks(left_of_runs, 2):
        assert not any(held)
        assert threads[0] == threads[1] == threads[2] < 20  # Megatron-Core makes some 20 groups, of three threads each


def test_a_call_hands_its_arguments_to_the_step() -> None:
    seen: dict[str, Any] = {}
    parallel: Any = SimpleNamespace(
        run_step=lambda stage, batch, **given: seen.update(stage=stage, batch=batch, **given)
    )
    shape = {"seq_length": 8, "micro_batch_size": 2, "num_microbatches": 3, "step_i": 5}
    MegatronParallel.forward(parallel, iter("abcd"), forward_only=False, **shape)
    assert seen["stage"] == "training" and list(seen["batch"]) == ["a", "b", "c"]
    assert {name: seen[name] for name in shape} == shape
    MegatronParallel.forward(parallel, "whole")
    assert (seen["stage"], seen["num_microbatches"], seen["step_i"], seen["seq_length"]) == ("validation", 1, 0, None)


class Line(pl.LightningModule):
    """A line through points."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.net(batch["x"]), batch["y"])

    def build_chunk(self, vp_stage: int) -> torch.nn.Module:
        return torch.nn.Linear(4, 4)


def made_by_hand() -> dict[str, Any]:
    """`MegatronParallel` with each of its arguments, on two replicas, beside plain PyTorch on all points."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallelConfig

    from nemo2.base.backend import get_backend
    from nemo2.mcore.parallel.groups import initialize_model_parallel
    from nemo2.mcore.parallel.hooks import CallbackConnector
    from nemo2.mcore.parallel.layout import Layout
    from nemo2.mcore.parallel.loss import ScalarLossReduction
    from nemo2.mcore.precision import MegatronMixedPrecision

    class Doubled(ScalarLossReduction):
        def reduce(self, losses_reduced_per_micro_batch: Any) -> Any:
            return 2 * super().reduce(losses_reduced_per_micro_batch)

    class Listening:
        def __init__(self) -> None:
            self.heard: list[str] = []

        def on_megatron_microbatch_end(self, output: torch.Tensor) -> None:
            self.heard.append(str(output.dtype))

    get_backend().install()
    initialize_model_parallel(Layout())
    points = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))
    whole = {"x": points[:, :4], "y": points[:, 4:]}
    share = {key: value[parallel_state.get_data_parallel_rank() :: 2] for key, value in whole.items()}
    plain = Line()
    loss = plain.training_step(whole)
    loss.backward()

    def step(**given: Any) -> float:
        return float(MegatronParallel(Line(), **given).training_step(share, num_microbatches=2))

    def without_targets(iterator: Any) -> Any:
        batch = default_data_step(iterator)
        return batch | {"y": torch.zeros_like(batch["y"])}

    trained = MegatronParallel(Line(), ddp_config=DistributedDataParallelConfig())
    found: dict[str, Any] = {
        "plain": float(loss.detach()),
        "plain at zero": float(plain.net(whole["x"]).detach().square().mean()),
        "pipeline": step(),
        "ddp_config": float(trained.training_step(share, num_microbatches=2)),
        "gradients": max(
            float((ours.main_grad.cpu() - theirs.grad).abs().max())  # pyright: ignore
            for ours, theirs in zip(trained.parameters(), plain.parameters(), strict=True)
        ),
        "data_step": step(data_step=without_targets),
        "forward_step": step(forward_step=lambda module, batch: 3 * module.training_step(batch)),
        "loss_reduction": step(loss_reduction=Doubled()),
    }
    listening = Listening()
    precise = MegatronParallel(
        Line(), precision_plugin=MegatronMixedPrecision("bf16-mixed"), callbacks=CallbackConnector([listening])
    )
    precise.training_step(share, num_microbatches=2)
    found |= {"precision_plugin": {str(one.dtype) for one in precise.parameters()}, "callbacks": listening.heard}
    found["device"] = {one.device.type for one in MegatronParallel(Line(), device=torch.device("meta")).parameters()}
    found["cpu"] = {one.device.type for one in MegatronParallel(Line(), cpu=True).parameters()}
    wrapped = MegatronParallel(Line(), wrap_chunk=lambda config, chunk: torch.nn.Sequential(chunk))
    found["wrap_chunk"] = type(wrapped[0]).__name__

    def frozen(module: torch.nn.Module, name: str) -> torch.nn.Module:
        return module.requires_grad_(False) if name.endswith("net") else module

    found["transform"] = {one.requires_grad for one in MegatronParallel(Line(), transform=frozen).parameters()}
    small_runs.release()
    initialize_model_parallel(Layout(pp=2, vp=2))
    chunks: Any = MegatronParallel(Line(), vp_size=2)
    found["vp_size"] = [chunk.vp_stage for chunk in chunks], len(chunks.pipeline)
    bucketed = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=1)
    chunks = MegatronParallel(Line(), vp_size=2, ddp_config=bucketed)
    found["buckets"] = [sum(len(buffer.buckets) for buffer in chunk.buffers) for chunk in chunks]
    return found


def test_each_argument_of_the_constructor_does_what_it_says(run_on_ranks: Any) -> None:
    ranks = run_on_ranks(made_by_hand, 2)
    for found in ranks:
        plain = pytest.approx(found["plain"], rel=1e-5)
        assert found["pipeline"] == found["ddp_config"] == plain and found["gradients"] < 1e-6
        assert found["data_step"] == pytest.approx(found["plain at zero"], rel=1e-5)
        assert found["forward_step"] == pytest.approx(3 * found["plain"], rel=1e-5)
        assert found["loss_reduction"] == pytest.approx(2 * found["plain"], rel=1e-5)
        assert found["precision_plugin"] == {"torch.bfloat16"} and found["callbacks"] == ["torch.bfloat16"] * 2
        assert (found["device"], found["wrap_chunk"], found["transform"]) == ({"meta"}, "Sequential", {False})
        assert found["vp_size"] == ([0, 1], 2) and found["cpu"] == {"cpu"}
    assert [found["buckets"] for found in ranks] == [[2, 1], [1, 1]], "as Megatron-LM's get_model"


def a_model_without_groups() -> tuple[str, str]:
    """Its device, and the counted parameters."""

    class Alone(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.module = torch.nn.Linear(3, 2)

    parallel = MegatronParallel(Alone(), cpu=True)
    return str(next(parallel.parameters()).device), str(parallel.__dict__["parameter_counts"])


def test_a_model_on_a_cpu_needs_no_process_groups(run_on_ranks):
    assert run_on_ranks(a_model_without_groups, 1) == [("cpu", "8 parameters, all of them trained")]
