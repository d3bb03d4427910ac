# SPDX-License-Identifier: Apache-2.0
"""MegatronCommOverlapCallback: its rules as a table, and where the answers are written."""

import logging
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, Optional

import fiddle as fdl
import pytest
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig

from nemo2.callbacks import megatron_comm_overlap
from nemo2.callbacks.megatron_comm_overlap import (
    DEFAULT_BUCKET_SIZE,
    MegatronCommOverlapCallback,
    OverlapFacts,
    decide,
    userbuffer_settings,
)
from nemo2.config import Config
from nemo2.errors import ConfigError
from nemo2.models.llama import LlamaConfig
from nemo2.parallel.layout import Layout


def facts(**changes: Any) -> OverlapFacts:
    plain: dict[str, Any] = {
        "tensor_parallel": 1,
        "pipeline_parallel": 1,
        "virtual_pipeline": None,
        "gradient_ranks": 8,
        "sequence_parallel": False,
        "distributed_optimizer": True,
        "fused_weight_gradients": True,
        "transformer_engine_missing": None,
    }
    return OverlapFacts(**plain | changes)


def values(given: OverlapFacts, asked: Optional[dict[str, Any]] = None, explicit: Any = None) -> dict[str, Any]:
    return {name: decision.value for name, decision in decide(given, asked or {}, explicit).items()}


# NeMo 2.0's table (its callback run with mocks), but for the first row, where the DDP config's own word counts here.
@pytest.mark.parametrize(
    ("given", "asked", "p2p", "data", "align", "bucket"),
    [
        ({}, {}, (False, False), (True, True), False, DEFAULT_BUCKET_SIZE),
        ({"gradient_ranks": 1}, {}, (False, False), (False, False), False, None),
        ({}, {"overlap_param_gather": False}, (False, False), (True, False), False, DEFAULT_BUCKET_SIZE),
        ({"pipeline_parallel": 4}, {}, (False, True), (True, True), False, DEFAULT_BUCKET_SIZE),
        ({"pipeline_parallel": 4, "virtual_pipeline": 2}, {}, (True, False), (True, True), True, DEFAULT_BUCKET_SIZE),
        ({}, {"bucket_size": 7}, (False, False), (True, True), False, 7),
    ],
)
def test_defaults_follow_the_layout(
    given: dict[str, Any], asked: dict[str, Any], p2p: tuple, data: tuple, align: bool, bucket: Optional[int]
) -> None:
    result = values(facts(**given), asked)
    assert (result["overlap_p2p_comm"], result["batch_p2p_comm"]) == p2p
    assert (result["overlap_grad_reduce"], result["overlap_param_gather"]) == data
    assert result["align_param_gather"] is align
    assert result.get("bucket_size") == bucket


def test_gathering_needs_overlapped_reduction() -> None:
    decided = decide(facts(), {"overlap_grad_reduce": False, "overlap_param_gather": True})
    assert decided["overlap_param_gather"] == (False, "overlap_grad_reduce is off")


def test_without_the_distributed_optimizer_the_ddp_config_is_left_alone() -> None:
    assert not values(facts(distributed_optimizer=False)).keys() & {"overlap_grad_reduce", "bucket_size"}
    asked = decide(facts(distributed_optimizer=False), {"overlap_param_gather": True})["overlap_param_gather"]
    assert asked == (False, "optim.config.use_distributed_optimizer is off")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"tensor_parallel": 1}, "tensor_model_parallel_size is 1"),
        ({"tensor_parallel": 2}, "sequence_parallel is off"),
        ({"tensor_parallel": 2, "sequence_parallel": True, "transformer_engine_missing": "not here"}, "not here"),
    ],
)
def test_tensor_overlap_is_turned_off_with_the_first_obstacle(given: dict[str, Any], reason: str) -> None:
    assert decide(facts(**given), {"tp_comm_overlap": True})["tp_comm_overlap"] == (False, reason)


def test_tensor_overlap_bootstraps_with_nccl_unless_told_otherwise() -> None:
    able = facts(tensor_parallel=2, sequence_parallel=True)
    assert values(able, {"tp_comm_overlap": True})["tp_comm_bootstrap_backend"] == "nccl"
    asked = {"tp_comm_overlap": True, "tp_comm_bootstrap_backend": "mpi"}
    assert values(able, asked)["tp_comm_bootstrap_backend"] == "mpi"


def test_embedding_gradients_are_deferred_only_where_megatron_can() -> None:
    asked = {"defer_embedding_wgrad_compute": True}
    assert values(facts(pipeline_parallel=2), asked)["defer_embedding_wgrad_compute"] is True
    assert values(facts(), asked)["defer_embedding_wgrad_compute"] is False
    unfused = facts(pipeline_parallel=2, fused_weight_gradients=False)
    assert decide(unfused, asked)["defer_embedding_wgrad_compute"].reason.startswith("model.config.gradient_acc")


def test_an_explicit_value_elsewhere_wins_over_a_default() -> None:
    explicit = {"overlap_grad_reduce": ("strategy.ddp_config.overlap_grad_reduce", False)}
    result = values(facts(), explicit=explicit)
    assert (result["overlap_grad_reduce"], result["overlap_param_gather"]) == (False, False)


def test_two_explicit_values_that_differ_are_an_error_naming_both() -> None:
    explicit = {"bucket_size": ("strategy.ddp_config.bucket_size", 5)}
    with pytest.raises(ConfigError, match=r"strategy\.ddp_config\.bucket_size=5 contradicts .*\(bucket_size=6\)"):
        decide(facts(), {"bucket_size": 6}, explicit)
    assert values(facts(), {"bucket_size": 5}, explicit)["bucket_size"] == 5


@pytest.mark.parametrize(
    ("given", "asked", "words"),
    [
        ({"pipeline_parallel": 2}, {"overlap_p2p_comm": True}, "needs virtual pipeline stages"),
        ({"pipeline_parallel": 2, "virtual_pipeline": 2}, {"batch_p2p_comm": True}, "exclude each other"),
    ],
)
def test_what_megatron_cannot_run_is_refused(given: dict[str, Any], asked: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        decide(facts(**given), asked)


def a_run(ddp: Any, *, layout: Layout = Layout(), world: int = 4, explicit: frozenset[str] = frozenset()) -> Any:  # noqa: B008
    """Trainer and module as far as the callback looks at them, with Megatron-Core's own configs."""
    config = LlamaConfig(num_layers=2, hidden_size=32, num_attention_heads=4, ffn_hidden_size=64)
    strategy = SimpleNamespace(layout=layout, ddp_config=ddp, explicit_ddp_fields=explicit)
    trainer = SimpleNamespace(strategy=strategy, world_size=world, is_global_zero=True)
    optimizer_config = fdl.build(Config(OptimizerConfig, lr=1e-3, use_distributed_optimizer=True))
    return trainer, SimpleNamespace(config=config, optim=SimpleNamespace(config=optimizer_config))


def test_answers_reach_model_ddp_and_optimizer_config() -> None:
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
    trainer, module = a_run(ddp)
    MegatronCommOverlapCallback(bucket_size=1000).setup(trainer, module, "fit")
    assert (ddp.overlap_grad_reduce, ddp.overlap_param_gather, ddp.bucket_size) == (True, True, 1000)
    assert module.optim.config.overlap_param_gather is True
    assert (module.config.tp_comm_overlap, module.config.batch_p2p_comm) == (False, False)


def test_context_parallel_ranks_count_because_they_reduce_gradients_too() -> None:
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
    trainer, module = a_run(ddp, layout=Layout(cp=4))
    MegatronCommOverlapCallback().setup(trainer, module, "fit")
    assert ddp.overlap_grad_reduce is True


def test_what_does_not_take_effect_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    trainer, module = a_run(DistributedDataParallelConfig(use_distributed_optimizer=True))
    callback = MegatronCommOverlapCallback(tp_comm_overlap=True)
    with caplog.at_level(logging.WARNING):
        callback.setup(trainer, module, "fit")
        callback.setup(trainer, module, "fit")
    said = [record.getMessage() for record in caplog.records if "tp_comm_overlap" in record.getMessage()]
    assert said == [
        "MegatronCommOverlapCallback.tp_comm_overlap=True does not take effect, it is False: "
        "tensor_model_parallel_size is 1."
    ]


def test_another_strategy_is_refused() -> None:
    trainer: Any = SimpleNamespace(strategy=object())
    with pytest.raises(ConfigError, match="works with MegatronStrategy only"):
        MegatronCommOverlapCallback().setup(trainer, SimpleNamespace(), "fit")  # pyright: ignore[reportArgumentType]


def test_userbuffer_settings_are_passed_without_what_is_unset() -> None:
    @dataclass
    class Settings:
        qkv_fprop: Optional[dict[str, Any]] = None
        fc2_dgrad: Optional[dict[str, Any]] = None

    expected = {"qkv_fprop": {"method": "ring_exchange"}}
    assert userbuffer_settings(Settings(qkv_fprop={"method": "ring_exchange"})) == expected
    assert userbuffer_settings({**expected, "fc2_dgrad": None}) == expected
    assert userbuffer_settings(None) is None
    with pytest.raises(ConfigError, match="must be a dict of GEMM names"):
        userbuffer_settings(3)


@pytest.mark.parametrize("generation", ["use_fp8", "quantization_modes"])
def test_userbuffers_are_started_once_with_the_shape_a_rank_holds(
    monkeypatch: pytest.MonkeyPatch, generation: str
) -> None:
    started: list[dict[str, Any]] = []

    def older(*, shape: Any, tp_size: int, use_fp8: bool, **rest: Any) -> None:
        started.append({"shape": shape, "tp_size": tp_size, "use_fp8": use_fp8, **rest})

    def newer(*, shape: Any, tp_size: int, quantization_modes: Any, **rest: Any) -> None:
        started.append({"shape": shape, "tp_size": tp_size, "quantization_modes": quantization_modes, **rest})

    base: Any = ModuleType("transformer_engine.pytorch.module.base")
    base.initialize_ub = older if generation == "use_fp8" else newer
    base.UserBufferQuantizationMode = SimpleNamespace(FP8="fp8", NONE="none")
    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.module"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    monkeypatch.setattr(megatron_comm_overlap, "have_te", lambda: True)

    trainer, module = a_run(
        DistributedDataParallelConfig(use_distributed_optimizer=True), layout=Layout(tp=2, cp=2, sp=True)
    )
    trainer.strategy.data_sampler = SimpleNamespace(seq_len=128, micro_batch_size=3)
    module.config.tensor_model_parallel_size, module.config.context_parallel_size = 2, 2
    callback = MegatronCommOverlapCallback(tp_comm_overlap=True, tp_comm_overlap_cfg={"qkv_fprop": {"num_sm": 2}})
    callback.setup(trainer, module, "fit")
    callback.on_fit_start(trainer, module)
    callback.on_validation_start(trainer, module)
    assert module.config.tp_comm_overlap is True
    expected = {"shape": [128 * 3 // 2, 32], "tp_size": 2, "ub_cfgs": {"qkv_fprop": {"num_sm": 2}}}
    precision = {"use_fp8": False} if generation == "use_fp8" else {"quantization_modes": ["none"]}
    assert started == [expected | precision | {"bootstrap_backend": "nccl"}]
