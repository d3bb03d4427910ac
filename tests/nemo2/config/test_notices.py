# SPDX-License-Identifier: Apache-2.0
"""Arguments that change nothing are accepted, and a value other than the default is reported."""

from collections.abc import Callable
from typing import Any

import pytest
from megatron.core.optimizer import OptimizerConfig

import nemo2 as nl
from nemo2.base.errors import ConfigError
from nemo2.checkpoint.io import MegatronCheckpointIO
from nemo2.config import notices
from nemo2.llm.api import generate
from nemo2.llm.serving import deploy
from nemo2.mcore.optim.lr_scheduler import PolynomialDecayAnnealingScheduler
from nemo2.models.gpt3 import GPTConfig126M

MADE: dict[str, tuple[Callable[..., Any], Any]] = {
    "load_directly_on_device": (MegatronCheckpointIO, False),
    "ckpt_load_directly_on_device": (nl.MegatronStrategy, False),
    "enable_version_counter": (nl.ModelCheckpoint, True),
    "use_transformer_engine_full_layer_spec": (GPTConfig126M, False),
    "apply_residual_connection_post_layernorm": (GPTConfig126M, True),
    "moe_token_dropping": (GPTConfig126M, True),
    "moe_per_layer_logging": (GPTConfig126M, True),
    "moe_router_topk": (GPTConfig126M, 4),
    "mup_embedding_mult": (GPTConfig126M, 4.0),
    "mtp_loss_scaling_factor": (GPTConfig126M, 0.5),
    "linear_conv_kernel_dim": (GPTConfig126M, 8),
    "sgd_momentum": (lambda **given: nl.MegatronOptimizerModule(OptimizerConfig(lr=1e-3, **given)), 0.5),
    "muon_momentum": (lambda **given: nl.MegatronOptimizerModule(OptimizerConfig(lr=1e-3, **given)), 0.5),
    "cycle": (PolynomialDecayAnnealingScheduler, True),
    "inference_batch_times_seqlen_threshold": (lambda **given: refused(generate, path="nowhere", **given), 10),
    "enable_flash_decode": (lambda **given: refused(deploy, **given), False),
    "model_type": (lambda **given: refused(deploy, **given), "llama"),
}


def refused(function: Callable[..., Any], **given: Any) -> None:
    with pytest.raises(ConfigError):  # without a checkpoint
        function(**given)


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "_announced", set())


@pytest.mark.parametrize("name", MADE)
def test_a_value_without_effect_is_reported_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    make, value = MADE[name]
    make()
    assert caplog.messages == []
    make(**{name: value})
    make(**{name: value})
    [message] = caplog.messages
    assert message.startswith(f"{name.removeprefix('ckpt_')}={value!r} has no effect. ")


def test_rank_0_alone_reports(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    MegatronCheckpointIO(load_directly_on_device=False)
    assert caplog.messages == []
