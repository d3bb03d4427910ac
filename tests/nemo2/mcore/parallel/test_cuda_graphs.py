# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs in the training loop, with Megatron-Core's own wrappers over stand-ins for captures.

A stand-in replays what was captured, with the captured inputs, and calls nothing else of the step: a loop that relied on
Python inside a replay, or captured at the wrong time, trains otherwise than without graphs. tests/gpu has the real thing.
"""

import contextlib
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from nemo2.base.errors import ConfigError
from nemo2.mcore.parallel.cuda_graphs import kind_of, modules_of
from nemo2.mcore.parallel.ddp_config import DistributedDataParallelConfig
from nemo2.mcore.parallel.step_graphs import refuse_hooks
from support import small_runs
from support.nightly import each_case

STEPS, WARMUP = 6, 2


class StandIn:
    """Replaces what needs a GPU in this process, and counts."""

    def __init__(self) -> None:
        self.captures = self.replays = self.calls_inside = self.hooks = self.deleted = 0
        self.seeds: list[bool] = []

    @contextlib.contextmanager
    def in_place(self) -> Any:
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        from nemo2.base.backend.cpu import CpuBackend
        from nemo2.training.strategies import base

        overrides, seed = CpuBackend.config_overrides, base.seed_random_streams

        def honest(backend: Any) -> Any:
            return {name: value for name, value in overrides(backend).items() if "cuda_graph" not in name}

        def seeded(number: int, *, te_rng_tracker: bool, for_graphs: bool) -> None:
            self.seeds.append(for_graphs)
            seed(number, te_rng_tracker=te_rng_tracker)
            # Megatron-Core asserts a tracker whose state lives on a GPU, or this.
            get_cuda_rng_tracker().is_inference_rng_tracker = True  # pyright: ignore[reportOptionalMemberAccess]

        with patch.object(CpuBackend, "config_overrides", honest), patch.object(base, "seed_random_streams", seeded):
            yield self

    @contextlib.contextmanager
    def layers(self) -> Any:
        """Transformer Engine's ``make_graphed_callables`` for Megatron-Core's helper."""

        from megatron.core.transformer import cuda_graphs
        from megatron.core.transformer.module import GraphableMegatronModule
        from megatron.core.transformer.transformer_layer import TransformerLayer

        def make(layers: Any, arguments: Any, *, sample_kwargs: Any, **options: Any) -> tuple[Any, ...]:
            self.captures += 1
            count = len(arguments) // len(layers)
            self.microbatches = count
            for layer, inputs, named in zip(layers * count, arguments, sample_kwargs, strict=False):
                # As a fused weight gradient does: the loop must not train on what samples left behind.
                own = list(layer.parameters())
                found = torch.autograd.grad(layer(*inputs, **named)[0].float().sum(), own, allow_unused=True)
                for parameter, gradient in zip(own, found, strict=True):
                    parameter.main_grad.add_(gradient)
            return tuple(self._replaying(layer) for layer in layers * count)

        with (
            patch.object(cuda_graphs, "HAVE_TE_GRAPHS", True),
            patch.object(cuda_graphs, "is_te_min_version", lambda version: True),
            patch.object(cuda_graphs, "make_graphed_callables", make, create=True),
            # The layer's own also makes an empty mask, for which it imports Transformer Engine.
            patch.object(
                TransformerLayer,
                "_get_te_cuda_graph_replay_args",
                GraphableMegatronModule._get_te_cuda_graph_replay_args,
            ),
        ):
            yield

    def _replaying(self, layer: Any) -> Any:
        def replay(*inputs: Any, is_first_microbatch: bool, **named: Any) -> Any:
            self.replays += 1
            return layer._te_cuda_graph_capture(*inputs, **named)

        replay.reset = lambda: setattr(self, "deleted", self.deleted + 1)  # pyright: ignore[reportFunctionMemberAccess]
        return replay

    @contextlib.contextmanager
    def whole_step(self) -> Any:
        """``torch.cuda.CUDAGraph`` of a whole schedule: its replay runs the captured step on the static inputs again."""

        from megatron.core.full_cuda_graph import StaticBufferLoader

        import nemo2.mcore.parallel.megatron_parallel as parallel

        real = parallel.get_forward_backward_func
        capturing: list[Any] = []

        class Graph:
            call: Any = None

            def register_generator_state(self, state: Any) -> None:
                """Nothing to advance."""

            def replay(graph) -> None:
                self.replays += 1
                inputs = [iter(StaticBufferLoader.static_buffers["training"])]
                again = real()(**{**graph.call, "data_iterator": inputs})
                for old, new in zip(graph.results, again, strict=True):
                    for name in old:
                        old[name].copy_(new[name])

        @contextlib.contextmanager
        def capture(graph: Any, **options: Any) -> Any:
            self.captures += 1
            capturing.append(graph)
            yield
            capturing.pop()

        def schedule(**call: Any) -> Any:
            results = real()(**call)
            if capturing:  # a capture computes nothing: what it left behind goes
                for chunk in call["model"]:
                    chunk.zero_grad_buffer()
                capturing[0].call, capturing[0].results = call, results
            return results

        with (
            patch.object(parallel, "get_forward_backward_func", lambda: schedule),
            patch.object(torch.cuda, "CUDAGraph", Graph),
            patch.object(torch.cuda, "graph", capture),
            patch.object(torch.cuda, "graph_pool_handle", lambda: None),
            patch.object(torch.cuda, "get_device_capability", lambda: (9, 0)),
        ):
            yield


@pytest.fixture
def run_on_ranks(run_on_ranks: Any) -> Any:
    """On CPUs, because the stand-ins are for those."""
    return partial(run_on_ranks, env={"CUDA_VISIBLE_DEVICES": ""})


def train(kind: str, *, hooks: bool = False, **options: Any) -> dict[str, Any]:
    """The record of a run, and what the stand-ins counted."""
    import lightning.pytorch as pl

    heard: list[int] = []

    captured: list[bool] = []

    class Ends(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            graphs = trainer.strategy.megatron_parallel.graphs
            captured.append(graphs is not None and graphs.captured)

    class Counts(pl.Callback):
        def on_megatron_microbatch_start(self, step: Any) -> None:
            if step.stage == "training":
                heard.append(step.step_i)

    inside = StandIn()
    settings = options.pop("settings", {})
    graphs = {"cuda_graph_impl": kind, "cuda_graph_warmup_steps": WARMUP} if kind != "none" else {}
    options["callbacks"] = [Ends(), Counts()] if hooks else [Ends()]
    inspected = {"inspect": lambda trainer: trainer.strategy.ddp_config.check_for_nan_in_grad}
    with contextlib.ExitStack() as stack:
        if kind != "none":
            stack.enter_context(inside.in_place())
            stack.enter_context(inside.layers() if kind == "transformer_engine" else inside.whole_step())
        model = small_runs.build_llama(**{"distributed": True, **settings, **graphs})
        record = small_runs.fit(model, max_steps=STEPS, precision="bf16-mixed", **inspected, **options)
    return record | {"captured": captured, "heard": heard, "counted": vars(inside)}


def with_and_without(kind: str, **options: Any) -> dict[str, Any]:
    plain = train("none", **options)
    small_runs.release()
    return {"plain": plain, "graphs": train(kind, **options)}


def assert_trains_the_same(found: dict[str, Any], **counted: Any) -> None:
    plain, graphs = found["plain"], found["graphs"]
    assert (graphs["losses"], graphs["grad_norms"]) == (plain["losses"], plain["grad_norms"])
    assert graphs["captured"] == [False] * WARMUP + [True] * (STEPS - WARMUP)
    assert {name: graphs["counted"][name] for name in counted} == counted


@pytest.mark.parametrize(
    ("world_size", "gather"), each_case([(1, False), (2, False), (2, True)], [(1, False), (2, True)])
)
def test_layers_are_captured_after_the_warm_up_and_train_as_without(
    run_on_ranks: Any, world_size: int, gather: bool
) -> None:
    """Also where parameters are gathered beside the graphs."""
    overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    options = {"ddp": DistributedDataParallelConfig(use_distributed_optimizer=True, **overlap)} if gather else {}
    found = run_on_ranks(with_and_without, world_size, "transformer_engine", **options)[0]
    microbatches, layers = small_runs.GBS // small_runs.MBS // world_size, small_runs.MODEL["num_layers"]
    assert_trains_the_same(found, captures=1, replays=layers * microbatches * (STEPS - WARMUP), seeds=[True])
    counted = found["graphs"]["counted"]
    assert counted["deleted"] == layers * counted["microbatches"]  # at the end of the run


TWO_STAGES = {"pipeline_model_parallel_size": 2}


@pytest.mark.parametrize("layout", each_case([{}, TWO_STAGES, {"tensor_model_parallel_size": 2}], [{}, TWO_STAGES]))
def test_a_whole_step_is_replayed_on_new_batches(run_on_ranks: Any, layout: dict[str, int]) -> None:
    world_size = 2 if layout else 1
    found = run_on_ranks(with_and_without, world_size, "full_iteration", hooks=True, **layout)[0]
    assert_trains_the_same(found, captures=1, replays=STEPS - WARMUP)
    assert found["plain"]["inspected"] is True
    assert found["graphs"]["inspected"] is False  # the search for NaN waits for the GPU


def twice() -> list[list[float]]:
    first = train("full_iteration")
    small_runs.release()
    return [first["losses"], train("full_iteration")["losses"]]


def test_a_second_run_of_a_process_captures_its_own_step(run_on_ranks: Any) -> None:
    first, second = run_on_ranks(twice, 1)[0]
    assert first == second


def refusals() -> dict[str, str]:
    """The refusal of a run whose settings don't go together."""
    said = {}
    checked = DistributedDataParallelConfig(use_distributed_optimizer=True, check_for_nan_in_grad=True)
    cases: dict[str, Any] = {
        "nan": ("full_iteration", {"ddp": checked}),
        "fsdp": ("transformer_engine", {"fsdp": "megatron"}),
        "fp32": ("transformer_engine", {"precision": "32"}),
    }
    for name, (kind, options) in cases.items():
        inside = StandIn()
        with inside.in_place(), pytest.raises(ConfigError) as caught:
            small_runs.fit(
                small_runs.build_llama(distributed=True, cuda_graph_impl=kind),
                max_steps=1,
                **{"precision": "bf16-mixed", **options},
            )
        said[name] = str(caught.value)
        small_runs.release()
    return said


def test_what_a_graph_cannot_hold_is_refused_before_the_run(run_on_ranks: Any) -> None:
    said = run_on_ranks(refusals, 1)[0]
    assert "check_for_nan_in_grad=True" in said["nan"]
    assert "test_cuda_graphs.py" in said["nan"]  # where it was set
    assert "Megatron-FSDP" in said["fsdp"]
    assert "bf16" in said["fp32"]


def switched() -> list[Any]:
    """NeMo's switches, through the two looks that Megatron-Core takes at a configuration, and beside a setting of ours."""
    found = []
    for switch in ("enable_cuda_graph", "external_cuda_graph"):
        inside = StandIn()
        with inside.in_place():
            model = small_runs.build_llama(**{switch: True})
            model.config.bf16 = True
            model.config.__post_init__()
            found.append((model.config.cuda_graph_impl, getattr(model.config, switch)))
    return found


def test_nemos_switches_are_understood(run_on_ranks: Any) -> None:
    assert run_on_ranks(switched, 1)[0] == [("local", False), ("transformer_engine", False)]


def graphs_of(kind: str, *, stages: int = 1, hooks: tuple[str, ...] = ()) -> Any:
    from nemo2.mcore.parallel.step_graphs import StepGraphs

    config = SimpleNamespace(cuda_graph_impl=kind, pipeline_model_parallel_size=stages, cuda_graph_warmup_steps=3)
    return StepGraphs([], config, pause_gathers=contextlib.nullcontext, heard_per_microbatch=lambda: list(hooks))


def step_of(batch: Any = None, *, microbatches: int = 4, seq: int = 16) -> Any:
    return SimpleNamespace(
        batch={"tokens": torch.zeros(8, 16)} if batch is None else batch,
        num_microbatches=microbatches,
        micro_batch_size=2,
        seq_length=seq,
    )


def test_hooks_on_captured_layers_are_refused() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer_number, self.mlp = 3, torch.nn.Linear(2, 2)

    layer = Layer()
    refuse_hooks([layer])
    handle = layer.mlp.register_forward_hook(watch)
    with pytest.raises(
        ConfigError, match=r"hooks on mlp of layer 3: watch\. A graph replays kernels .* Remove the hooks before"
    ):
        refuse_hooks([layer])
    handle.remove()
    refuse_hooks([layer])


def watch(*arguments: Any) -> None:
    """A user's."""


PACKED = {"tokens": torch.zeros(1, 16), "cu_seqlens": torch.tensor([0, 7, 16])}


@pytest.mark.parametrize(
    ("kind", "batch", "words"),
    [
        ("local", PACKED, "packed sequences"),
        ("local", (PACKED, 0, 0), "packed sequences"),
        ("full_iteration", torch.zeros(3), "this batch is a Tensor"),
    ],
)
def test_batches_that_no_graph_holds_are_refused(kind: str, batch: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        graphs_of(kind).around(len, step_of(batch))


def test_a_batch_that_grows_is_refused_where_its_size_was_captured() -> None:
    for graphs in (graphs_of("local"), graphs_of("local", stages=2)):
        assert graphs.around(len, step_of()) is len
    graphs = graphs_of("local")
    graphs.around(len, step_of())
    assert graphs.around(len, step_of(microbatches=8)) is len  # one micro-batch after the other, each the same
    staged = graphs_of("local", stages=2)
    staged.around(len, step_of())
    with pytest.raises(ConfigError, match="4 micro-batches, but this step has .* 8 micro-batches"):
        staged.around(len, step_of(microbatches=8))
    with pytest.raises(ConfigError, match="rampup_batch_size"):
        graphs.around(len, step_of(seq=32))


def test_hooks_that_a_replay_does_not_call_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    listening = graphs_of("full_iteration", hooks=("Mine",))
    listening._refuse_what_cannot_replay(step_of())
    listening._refuse_what_cannot_replay(step_of())
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "Mine: on_megatron_microbatch_start or on_megatron_microbatch_end is no longer called"
    )
    graphs_of("local", hooks=("Mine",))._refuse_what_cannot_replay(step_of())
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("config", "kind", "modules"),
    [
        ({}, "none", ()),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": "full"}, "local", ()),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"}, "full_iteration", ("full_iteration",)),
        ({"cuda_graph_impl": "full_iteration", "cuda_graph_modules": []}, "full_iteration", ()),
        (
            {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": "attn,mlp"},
            "transformer_engine",
            ("attn", "mlp"),
        ),
        ({"enable_cuda_graph": True}, "local", ()),
        ({"external_cuda_graph": True, "cuda_graph_impl": "none"}, "transformer_engine", ()),
    ],
)
def test_both_versions_names_are_understood(config: dict[str, Any], kind: str, modules: tuple[str, ...]) -> None:
    assert kind_of(SimpleNamespace(**config)) == kind
    assert modules_of(SimpleNamespace(**config)) == modules
