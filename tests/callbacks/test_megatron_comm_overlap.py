# SPDX-License-Identifier: Apache-2.0
"""MegatronCommOverlapCallback: where its answers are written, what it says, what it starts. The rules:
tests/nemo2/mcore/overlap."""

import logging
from types import SimpleNamespace
from typing import Any, Optional

import pytest
import torch

from nemo2.base.errors import ConfigError
from nemo2.callbacks.megatron_comm_overlap import MegatronCommOverlapCallback
from nemo2.config.provenance import adjustments
from nemo2.mcore.overlap.presets import preset
from nemo2.mcore.parallel.ddp_config import DistributedDataParallelConfig, OptimizerConfig
from nemo2.mcore.parallel.layout import Layout
from nemo2.mcore.settle import Machine
from nemo2.mcore.settle.run_settings import RunSettings
from nemo2.models.llama import LlamaConfig


def a_run(*, layout: Optional[Layout] = None, world: int = 4, machine: Optional[Machine] = None, **model: Any) -> Any:
    """Trainer and module as far as the callback looks at them, with Megatron-Core's own configurations."""
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 64}
    strategy = SimpleNamespace(
        layout=layout or Layout(),
        ddp_config=DistributedDataParallelConfig(),
        data_sampler=SimpleNamespace(seq_len=8192, micro_batch_size=1),
    )
    trainer = SimpleNamespace(strategy=strategy, world_size=world, is_global_zero=True)
    optimizer, config = OptimizerConfig(lr=1e-3, use_distributed_optimizer=True), LlamaConfig(**sizes | model)
    strategy.run_settings = lambda module: RunSettings(
        parallelism=SimpleNamespace(**strategy.layout.fields()),  # pyright: ignore[reportArgumentType]
        ddp_config=strategy.ddp_config,
        optimizer_config=optimizer,
        model_config=config,
        machine=machine or Machine.here(),
    )
    return trainer, SimpleNamespace(config=config, optim=SimpleNamespace(config=optimizer))


def test_answers_reach_model_ddp_and_optimizer_config_with_their_reasons():
    trainer, module = a_run()
    MegatronCommOverlapCallback(bucket_size=1000).setup(trainer, module, "fit")
    ddp = trainer.strategy.ddp_config
    assert (ddp.overlap_grad_reduce, ddp.overlap_param_gather, ddp.bucket_size) == (True, True, 1000)
    assert module.optim.config.overlap_param_gather is True
    assert (module.config.tp_comm_overlap, module.config.batch_p2p_comm) == (False, False)
    [why] = [step.why for step in adjustments(ddp)["overlap_grad_reduce"]]
    assert why == "MegatronCommOverlapCallback: 4 ranks reduce gradients together"
    assert "pipeline_model_parallel_size is 1" in adjustments(module.config)["batch_p2p_comm"][0].why


def test_what_does_not_take_effect_is_said_once(caplog):
    trainer, module = a_run()
    callback = MegatronCommOverlapCallback(tp_comm_overlap=True)
    with caplog.at_level(logging.WARNING):
        callback.setup(trainer, module, "fit")
        callback.setup(trainer, module, "validate")
    assert [record.getMessage() for record in caplog.records] == [
        "MegatronCommOverlapCallback(tp_comm_overlap=True) does not take effect. The run uses False: "
        "tensor_model_parallel_size is 1."
    ]


def test_a_callback_serves_the_next_run_too():
    callback = MegatronCommOverlapCallback()
    for world, on in ((4, True), (1, False)):
        trainer, module = a_run(world=world)
        callback.setup(trainer, module, "fit")
        assert trainer.strategy.ddp_config.overlap_grad_reduce is on


def test_two_callbacks_count_as_one_with_the_arguments_of_both():
    trainer, module = a_run()
    first, second = MegatronCommOverlapCallback(tp_comm_overlap=False), MegatronCommOverlapCallback(bucket_size=9)
    trainer.callbacks = [first, second]
    for callback in trainer.callbacks:
        callback.setup(trainer, module, "fit")
    assert trainer.strategy.ddp_config.bucket_size == 9
    assert first.decisions["bucket_size"].value == 9 and not second.decisions
    trainer.callbacks.append(MegatronCommOverlapCallback(bucket_size=8))
    with pytest.raises(
        ConfigError, match=r"\(bucket_size=9\) .* contradicts MegatronCommOverlapCallback\(bucket_size=8\)"
    ):
        first.setup(trainer, module, "fit")


def test_another_strategy_is_refused():
    trainer: Any = SimpleNamespace(strategy=object())
    with pytest.raises(ConfigError, match="requires MegatronStrategy"):
        MegatronCommOverlapCallback().setup(trainer, SimpleNamespace(), "fit")  # pyright: ignore[reportArgumentType]


H100 = Machine.named("H100")


def test_the_preset_of_the_run_is_written_where_the_strategy_looks_for_it():
    layout = Layout(tp=4, cp=2, sp=True)
    trainer, module = a_run(
        layout=layout, world=8, machine=H100, hidden_size=8192, num_attention_heads=64, params_dtype=torch.bfloat16
    )
    callback = MegatronCommOverlapCallback(tp_comm_overlap=True)
    callback.setup(trainer, module, "fit")
    config = module.config
    name = "userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192"
    assert callback.decisions["tp_comm_overlap_cfg"].reason.startswith(f"preset {name}: tuned for h100, 16 bits")
    assert (config.tp_comm_overlap, config.tp_comm_overlap_cfg) == (True, preset(name))
    assert config.tp_comm_bootstrap_backend == "nccl"


def test_no_tensor_overlap_where_nothing_was_asked_for():
    trainer, module = a_run(layout=Layout(tp=4, sp=True), machine=H100)
    MegatronCommOverlapCallback().setup(trainer, module, "fit")
    assert module.config.tp_comm_overlap is False


def test_buffers_can_be_left_to_transformer_engine_or_given():
    for asked, expected in (("default", None), ({"qkv_fprop": {"num_sm": 3}}, {"qkv_fprop": {"num_sm": 3}})):
        trainer, module = a_run(layout=Layout(tp=4, sp=True), machine=H100)
        callback = MegatronCommOverlapCallback(
            tp_comm_overlap=True, tp_comm_overlap_cfg=asked, tp_comm_bootstrap_backend="mpi"
        )
        callback.setup(trainer, module, "fit")
        assert module.config.tp_comm_overlap_cfg == expected
        assert module.config.tp_comm_bootstrap_backend == "mpi"
