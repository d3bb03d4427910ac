# SPDX-License-Identifier: Apache-2.0
"""Names and readings of NeMo's scripts."""

import inspect
from typing import Any

import pytest

import nemo2 as nl
from nemo2 import llm
from nemo2.base.errors import ConfigError
from nemo2.config import Config
from nemo2.mcore.optim.distributed_fused_adam import distributed_fused_adam
from nemo2.mcore.parallel.hooks import CallbackConnector

SIZES: dict[str, Any] = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 8}


def test_every_argument_of_a_live_fabric_strategy_can_be_read() -> None:
    strategy: Any = nl.FabricMegatronStrategy(tensor_model_parallel_size=2, megatron_callbacks=CallbackConnector())
    for name in inspect.signature(nl.FabricMegatronStrategy).parameters:
        getattr(strategy, name)
    assert strategy.tensor_model_parallel_size == 2 and strategy.no_ddp_communication_hook is True
    assert strategy.ddp is strategy.ddp_config is strategy.training.ddp_config
    with pytest.raises(AttributeError):
        strategy.tensor_model_paralel_size  # noqa: B018


def test_a_hook_that_is_replaced_after_registration_is_called() -> None:
    class Listener:
        def on_megatron_step_end(self) -> None:
            raise AssertionError("replaced")

    listener: Any = Listener()
    connector = CallbackConnector([listener])
    heard: list[int] = []
    listener.on_megatron_step_end = lambda step: heard.append(step)
    connector.event("on_megatron_step_end", step=3, reduced=None)
    assert heard == [3] and connector.callbacks == {"on_megatron_step_end": [listener]}


@pytest.mark.parametrize("config", [llm.LlamaConfig, llm.Nemotron4Config15B, llm.GPTConfig126M, llm.SSMConfig])
def test_bias_dropout_add_fusion_is_an_alias_on_every_model(config: Any) -> None:
    assert config(**SIZES, bias_dropout_add_fusion=False).bias_dropout_fusion is False
    node: Any = Config(config, **SIZES)
    node.bias_dropout_add_fusion = False
    assert node.bias_dropout_fusion is False


def test_the_groups_of_mamba_have_nemos_earlier_name() -> None:
    node: Any = Config(llm.SSMConfig, mamba_ssm_ngroups=2)
    assert node.mamba_num_groups == 2


def test_unknown_names_are_named_with_what_replaces_them() -> None:
    with pytest.raises(TypeError, match="distributed_fused_adam has no parameter 'no_such'"):
        distributed_fused_adam(no_such=1)  # pyright: ignore[reportCallIssue]
    for target in (llm.LlamaModel, llm.LlamaConfig):
        with pytest.raises(AttributeError, match="bf16_mixed"):
            Config(target).megatron_amp_O2 = True


def test_the_files_of_a_data_module_have_nemos_names(tmp_path: Any) -> None:
    data = llm.FineTuningDataModule(tmp_path)
    named = [data.train_path, data.validation_path, data.test_path]
    assert named == [tmp_path / f"{name}.jsonl" for name in ("training", "validation", "test")]


def test_a_strategy_of_another_trainer_is_refused_with_what_to_do() -> None:
    strategy = nl.MegatronStrategy()
    nl.Trainer(devices=1, accelerator="cpu", strategy=strategy)
    with pytest.raises(ConfigError, match="already belongs to another Trainer"):
        nl.Trainer(devices=1, accelerator="cpu", strategy=strategy)
