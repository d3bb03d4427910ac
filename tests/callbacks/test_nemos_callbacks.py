# SPDX-License-Identifier: Apache-2.0
"""Callbacks that NeMo's users name, on real models and ranks."""

import logging
import math
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

import nemo2 as nl
from nemo2.base.errors import ConfigError, RuntimeFault
from nemo2.callbacks import (
    DdpParityChecker,
    DeepEPCallback,
    JitConfig,
    JitTransform,
    LayerFreezer,
    MegatronEnableExperimentalCallback,
    MegatronTokenDropCallback,
    ModelTrainingStateCallback,
    OptimizerMonitor,
    ParameterDebugger,
    RuntimeEstimator,
    SpeedMonitor,
)
from support import small_runs
from support.one_weight import OneWeight, Recorder, run

FIRST = "decoder.layers.0"
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "distributed optimizer": ({"distributed": True}, {}),
    "tensor parallel": ({}, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pipeline": ({}, {"pipeline_model_parallel_size": 2}),
    "replicas": ({}, {}),
    "Megatron-FSDP": ({"distributed": True}, {"fsdp": "megatron"}),
    "FSDP2": ({}, {"strategy": "FSDP2Strategy"}),
    "FSDP": ({}, {"strategy": "FSDPStrategy"}),
}


def fit(
    callbacks: list[Any], *, model: dict[str, Any] | None = None, max_steps: int = 3, trainer: Any = None, **run: Any
) -> Any:
    logger = Recorder()
    if "strategy" in run:
        run["strategy"] = getattr(nl, run["strategy"])()
    found = small_runs.fit(
        small_runs.build_llama(**(model or {})),
        max_steps=max_steps,
        callbacks=callbacks,
        trainer={"logger": logger, **(trainer or {})},
        **run,
    )
    small_runs.release()
    return found | {"lines": [line for _, line in logger.lines if "grad_norm" in line or "l2_norm/grad/global" in line]}


class Weights(pl.Callback):
    """The parameters of the first layer, and of the others, after each step; and the modes of the first."""

    def __init__(self) -> None:
        self.seen: list[tuple[dict[str, torch.Tensor], bool]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.strategy.megatron_parallel.force_param_sync()
        names = [
            (name, parameter)
            for chunk in trainer.strategy.megatron_parallel.unwrapped
            for name, parameter in chunk.named_parameters()
        ]
        layers = [
            module
            for chunk in trainer.strategy.megatron_parallel.unwrapped
            for name, module in chunk.named_modules()
            if name == FIRST
        ]
        self.seen.append(({name: one.detach().clone() for name, one in names}, all(layer.training for layer in layers)))


class Drift(pl.Callback):
    """Rank 1's first parameter moves by one bit after a step."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2 and trainer.global_rank == 1:
            with torch.no_grad():
                next(trainer.strategy.megatron_parallel.parameters()).view(-1)[0].nextafter_(torch.tensor(9.0))


def watch_two_ranks() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (model, layout) in LAYOUTS.items():
        found[name] = fit([OptimizerMonitor()], model=model, max_steps=2, **layout)["lines"]
    for name in ("distributed optimizer", "replicas"):
        for precision in ("32", "bf16-mixed"):
            watch = Weights()
            model, layout = LAYOUTS[name]
            freezer = LayerFreezer({FIRST: 2, "embedding.word_embeddings": [1, 1]})
            fit([freezer, watch], model=model, max_steps=4, precision=precision, **layout)
            found["freezer", name, precision] = watch.seen
    eager = {"use_torch": True, "torch_kwargs": {"backend": "eager"}}
    fit([JitTransform(JitConfig("embedding", **eager))], max_steps=1, pipeline_model_parallel_size=2)
    static = fit([LayerFreezer([FIRST])], max_steps=4)
    found["frozen for ever"] = static["losses"], static["grad_norms"]
    with pytest.raises(ConfigError) as caught:
        fit([LayerFreezer(["decoder.layer.0"])])
    found["no such"] = str(caught.value)
    fit([DdpParityChecker(interval=1)], model={"distributed": True})
    fit([DdpParityChecker(interval=1)], tensor_model_parallel_size=2)
    with pytest.raises(RuntimeFault) as drifted:
        fit([Drift(), DdpParityChecker(interval=1)])
    found["drift"] = str(drifted.value)
    return found


@pytest.fixture(scope="module")
def two_ranks(run_on_ranks: Any) -> list[dict[str, Any]]:
    return run_on_ranks(watch_two_ranks, 2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_norms_are_the_whole_models_whatever_layout_shards_it(two_ranks, layout):
    lines, one = two_ranks[0][layout], two_ranks[0]["replicas"]
    assert len(lines) == len(one) == 2
    for line, expected in zip(lines, one, strict=True):
        norms = {key: value for key, value in line.items() if key.startswith("l2_norm/grad/")}
        assert norms["l2_norm/grad/global"] == pytest.approx(line["grad_norm"], rel=1e-5), "Megatron-Core's own"
        assert norms.keys() == {key for key in expected if key.startswith("l2_norm/grad/")}
        assert f"l2_norm/grad/{FIRST}.mlp.linear_fc1.weight" in norms
        for key, value in norms.items() if layout == "distributed optimizer" else ():  # from the same weights
            assert value == pytest.approx(expected[key], rel=1e-5), key


@pytest.mark.parametrize("precision", ["32", "bf16-mixed"])
@pytest.mark.parametrize("optimizer", ["distributed optimizer", "replicas"])
def test_a_frozen_layer_is_bit_equal_for_its_steps_and_trains_after(two_ranks, optimizer, precision):
    seen = two_ranks[0]["freezer", optimizer, precision]
    (first, eval_0), (second, eval_1), (third, eval_2), _ = seen
    layer = [name for name in first if name.startswith(FIRST)]
    assert layer and all(torch.equal(first[name], second[name]) for name in layer)
    assert any(not torch.equal(second[name], third[name]) for name in layer)
    embedding = "embedding.word_embeddings.weight"
    assert torch.equal(first[embedding], second[embedding]) and not torch.equal(second[embedding], third[embedding])
    other = "decoder.layers.1.mlp.linear_fc1.weight"
    assert not torch.equal(first[other], second[other])
    assert (eval_0, eval_1, eval_2) == (False, False, True)


def freeze_before_wrapping(module: Any) -> Any:
    for name, parameter in module.named_parameters():
        if name.startswith(FIRST):
            parameter.requires_grad_(False)
    return module


def train_with_a_transform() -> Any:
    from nemo2.callbacks import ModelTransform

    found = fit([ModelTransform(freeze_before_wrapping)], max_steps=4)
    return found["losses"], found["grad_norms"]


def test_frozen_for_ever_is_the_same_training_as_frozen_before_gradients_have_memory(two_ranks, run_on_ranks):
    losses, norms = two_ranks[0]["frozen for ever"]
    [(expected, expected_norms), _] = run_on_ranks(train_with_a_transform, 2)
    assert losses == pytest.approx(expected, rel=1e-6) and norms == pytest.approx(expected_norms, rel=1e-5)


def test_a_module_that_is_nowhere_is_named(two_ranks):
    assert "no module 'decoder.layer.0' with parameters; did you mean 'decoder.layers.0'" in two_ranks[1]["no such"]


def test_replicas_that_differ_by_a_bit_are_found_with_parameter_and_rank(two_ranks):
    for rank in range(2):
        told = two_ranks[rank]["drift"]
        assert "After step 2, data-parallel replicas differ in 1 parameters" in told and "on ranks [0, 1]" in told


def watch_one_rank() -> dict[str, Any]:
    found: dict[str, Any] = {}
    estimator, speed = RuntimeEstimator(time_unit="seconds"), SpeedMonitor(window_size=2, time_unit="minutes")
    found["lines"] = fit([estimator, speed], max_steps=4, trainer={"limit_val_batches": 1, "val_check_interval": 2})[
        "lines"
    ]
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # pyright: ignore[reportAttributeAccessIssue]
    for module in ("parameter_debugger", "training_state"):
        logger = logging.getLogger(f"nemo2.callbacks.{module}")
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    norm = ParameterDebugger(
        grad_fn=lambda grad: {"Sum": f"{float(grad.abs().sum()) > 0}"}, log_on_hooks="on_before_optimizer_step"
    )
    fit([norm], max_steps=1)
    found["table"], records[:] = records[-1], []
    validated = {"limit_val_batches": 1, "val_check_interval": 2}
    fit([ModelTrainingStateCallback(val_check_interval=1)], max_steps=4, trainer=validated)
    found["quiet"], records[:] = list(records), []
    fit([LeftInEval(), ModelTrainingStateCallback(val_check_interval=1)], max_steps=3, trainer=validated)
    found["warned"] = list(records)
    with pytest.raises(RuntimeFault) as caught:
        fit(
            [LeftInEval(), ModelTrainingStateCallback(val_check_interval=1, strict=True)],
            max_steps=3,
            trainer=validated,
        )
    found["strict"] = str(caught.value)
    graphs = Graphs()
    jit = JitConfig(module_selector="decoder.layers.*.mlp", use_torch=True, torch_kwargs={"backend": graphs})
    plain = fit([], max_steps=2)["losses"]
    compiled = fit([JitTransform(jit), Names()], max_steps=2)
    found["jit"] = len(graphs.seen) > 0, plain, compiled["losses"], Names.seen
    with pytest.raises(ConfigError) as unknown:
        fit([JitTransform(JitConfig(module_selector="decoder.layer.*", use_torch=True))])
    found["no such"] = str(unknown.value)
    return found


class Graphs:
    """A compiler that compiles nothing and remembers what it was given."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.seen.append(graph)
        return graph.forward


class LeftInEval(pl.Callback):
    """After a validation, and after Lightning has put back the modes that it knows."""

    def __init__(self) -> None:
        self.validated = False

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.validated = True

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if self.validated:
            trainer.strategy.megatron_parallel.unwrapped[0].decoder.layers[1].self_attention.eval()


class Names(pl.Callback):
    seen: list[str] = []

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        Names.seen = list(trainer.strategy.megatron_parallel.unwrapped[0].state_dict())


@pytest.fixture(scope="module")
def one_rank(run_on_ranks: Any) -> dict[str, Any]:
    return run_on_ranks(watch_one_rank, 1)[0]


def test_speed_and_what_is_left_follow_from_steps_samples_and_time(one_rank):
    lines = one_rank["lines"]
    assert len(lines) == 4
    for step, line in enumerate(lines, start=1):
        assert (line["time/batches"], line["time/samples"], line["time/tokens"]) == (
            step,
            8 * step,
            8 * step * small_runs.SEQ,
        )
        assert line["throughput/samples_per_sec"] == pytest.approx(8 * line["throughput/batches_per_sec"])
        assert line["throughput/tokens_per_sec"] == pytest.approx(small_runs.SEQ * line["throughput/samples_per_sec"])
        assert line["throughput/device/tokens_per_sec"] == line["throughput/tokens_per_sec"]
        assert (line["throughput/micro_batch_size"], line["throughput/global_batch_size"]) == (2, 8)
    assert "time/remaining_estimate" not in lines[0] and lines[-1]["time/remaining_estimate"] == 0
    pace = (lines[2]["time/total"] - lines[0]["time/total"]) / 2
    assert lines[2]["time/remaining_estimate"] == pytest.approx(pace, rel=0.2)
    assert lines[1]["time/val"] == 0 < lines[3]["time/val"]
    total = lines[3]["time/train"] + lines[3]["time/val"]
    assert total * 60 == pytest.approx(lines[3]["time/total"], rel=0.2)


def test_the_table_has_a_row_for_each_parameter_with_its_gradient(one_rank):
    lines = one_rank["table"].strip().splitlines()
    assert lines[0].split() == ["Parameter", "Param", "Shape", "Param", "Precision", "Grad", "Sum"]
    [row] = [line for line in lines if f"{FIRST}.mlp.linear_fc2.weight" in line]
    assert "(32, 64)" in row and "torch.float32" in row and row.split()[-1] == "True"


def test_modules_left_in_evaluation_mode_are_named(one_rank):
    assert one_rank["quiet"] == []
    assert len(one_rank["warned"]) == 1 and "decoder.layers.1.self_attention" in one_rank["warned"][0]
    assert "have a different mode than before validation" in one_rank["strict"]


def test_chosen_modules_are_compiled_and_train_the_same(one_rank):
    compiled, plain, losses, names = one_rank["jit"]
    assert compiled and losses == pytest.approx(plain, rel=1e-6)
    assert f"{FIRST}.mlp.linear_fc1.weight" in names and not any("_orig_mod" in name for name in names)
    assert "no such module; did you mean" in one_rank["no such"] or "no such module" in one_rank["no such"]


def experts(**config: Any) -> Any:
    return small_runs.build_llama(num_moe_experts=4, moe_router_topk=2, **config)


class Trainer:
    is_global_zero = True


def test_token_dropping_sets_the_models_fields_and_refuses_what_cannot_drop():
    model = experts(moe_token_dispatcher_type="alltoall")
    MegatronTokenDropCallback(1.5).setup(Trainer(), model, "fit")  # pyright: ignore[reportArgumentType]
    assert (model.config.moe_expert_capacity_factor, model.config.moe_pad_expert_input_to_capacity) == (1.5, True)
    MegatronTokenDropCallback(-1.0, False).setup(Trainer(), model, "fit")  # pyright: ignore[reportArgumentType]
    assert model.config.moe_expert_capacity_factor is None and not model.config.moe_pad_expert_input_to_capacity
    with pytest.raises(ConfigError, match="moe_token_dispatcher_type='allgather'.*alltoall"):
        MegatronTokenDropCallback().setup(Trainer(), experts(moe_token_dispatcher_type="allgather"), "fit")  # pyright: ignore
    with pytest.raises(ConfigError, match="has no experts"):
        MegatronTokenDropCallback().setup(Trainer(), small_runs.build_llama(), "fit")  # pyright: ignore


def test_deepep_is_for_gpus_that_have_it(monkeypatch, caplog):
    model = experts(moe_token_dispatcher_type="alltoall")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    DeepEPCallback().setup(Trainer(), model, "fit")  # pyright: ignore[reportArgumentType]
    assert model.config.moe_token_dispatcher_type == "alltoall" and "does not take effect" in caplog.text
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability in ((8, 0), (9, 0), (10, 0), (10, 3), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        model = experts(moe_token_dispatcher_type="alltoall")
        DeepEPCallback().setup(Trainer(), model, "fit")  # pyright: ignore[reportArgumentType]
        config = model.config
        works = config.moe_token_dispatcher_type == "flex" and config.moe_flex_dispatcher_backend == "deepep"
        assert works == (capability < (12, 0)) and not config.moe_enable_deepep  # which Megatron-Core calls deprecated


def test_under_other_strategies_what_the_step_calls_is_compiled():
    class Net(torch.nn.Module):  # dynamo leaves calls of torch's own classes alone
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, x: Any) -> Any:
            return x * self.weight

    class Model(OneWeight):
        def __init__(self) -> None:
            super().__init__()
            self.module = Net()

        def training_step(self, batch: Any) -> Any:
            return self.module(batch).sum()

    graphs = Graphs()
    run(JitTransform(JitConfig(use_torch=True, torch_kwargs={"backend": graphs})), model=Model(), steps=1)
    assert len(graphs.seen) == 1


def test_the_experimental_flag_is_up_before_the_model_is_built(monkeypatch):
    from megatron.core import config

    monkeypatch.setattr(config, "ENABLE_EXPERIMENTAL", False)
    MegatronEnableExperimentalCallback().setup(pl.Trainer(logger=False, accelerator="cpu"), pl.LightningModule(), "fit")
    assert config.is_experimental_enabled()


def test_a_schedule_reads_as_nemos():
    freezer = LayerFreezer({"a": -1, "b": 10, "c": [5, 9], "d": [5, -1]})
    assert freezer._steps == {"a": (0, math.inf), "b": (0, 9), "c": (5, 9), "d": (5, math.inf)}
