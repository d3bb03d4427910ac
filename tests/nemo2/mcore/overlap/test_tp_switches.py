# SPDX-License-Identifier: Apache-2.0
"""The switches that follow from userbuffer settings. That layers then find the buffers they ask for: test_userbuffers.py."""

from types import SimpleNamespace
from typing import Any

import pytest

from nemo2.base.errors import ConfigError
from nemo2.callbacks import MegatronCommOverlapCallback
from nemo2.mcore.overlap.presets import PRESETS, preset
from nemo2.mcore.overlap.tp_overlap_cfg import BulkOverlapCfg, PipelineOverlapCfg, RingExchangeOverlapCfg
from nemo2.mcore.overlap.tp_switches import SWITCHES, contradictions, switches_of, unswitchable
from nemo2.mcore.parallel.layout import Layout
from nemo2.mcore.settle.machine import Machine
from nemo2.mcore.settle.overlap import overlap
from nemo2.mcore.settle.run_settings import RunSettings
from nemo2.models.llama import LlamaConfig

FULL = "userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192"
PIPELINED = PipelineOverlapCfg(num_sm=16, cga_size=2, num_splits=4, set_sm_margin=True)


def edited(**changes: Any) -> Any:
    settings = preset(FULL)
    for name, value in changes.items():
        setattr(settings, name, value)
    return settings


def decisions(settings: Any, **switches: bool) -> dict[str, Any]:
    model = LlamaConfig(num_layers=1, hidden_size=8, num_attention_heads=1, **switches)
    run = RunSettings(
        parallelism=SimpleNamespace(**Layout(tp=4, sp=True).fields()),  # pyright: ignore[reportArgumentType]
        model_config=model,
        machine=Machine.named("H100"),
    )
    callback = MegatronCommOverlapCallback(tp_comm_overlap=True, tp_comm_overlap_cfg=settings)
    return overlap(run, [callback], world_size=8, data_sampler=None)


def test_without_settings_they_are_megatron_cores_defaults() -> None:
    config = LlamaConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    assert switches_of(None) == {name: getattr(config, name) for name in SWITCHES}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_switched_and_its_switches_are_decided(name: str) -> None:
    assert unswitchable(preset(name)) == []
    decided = decisions(preset(name))
    assert {one: decided[one].value for one in SWITCHES} == switches_of(preset(name))
    assert contradictions(preset(name), switches_of(preset(name))) == []


@pytest.mark.parametrize(
    ("changes", "switched"),
    [
        ({}, {}),
        ({"qkv_fprop": None}, {"tp_comm_overlap_disable_qkv": True}),
        ({"fc1_fprop": None}, {"tp_comm_overlap_disable_fc1": True}),
        ({"proj_fprop": None, "fc2_fprop": None}, {"tp_comm_overlap_rs": False}),
        ({"qkv_wgrad": None, "fc1_wgrad": None}, {"tp_comm_bulk_wgrad": False}),
        ({"qkv_dgrad": None, "fc1_dgrad": None}, {"tp_comm_bulk_dgrad": False}),
        (dict.fromkeys(("qkv_fprop", "fc1_fprop", "proj_dgrad", "fc2_dgrad")), {"tp_comm_overlap_ag": False}),
        (
            {"qkv_dgrad": PIPELINED, "fc1_dgrad": PIPELINED, "qkv_wgrad": None, "fc1_wgrad": None},
            {"tp_comm_overlap_rs_dgrad": True, "tp_comm_bulk_dgrad": False, "tp_comm_bulk_wgrad": False},
        ),
        (
            {"fc1_dgrad": PIPELINED, "fc1_wgrad": None},
            {"tp_comm_overlap_rs_dgrad": True, "tp_comm_overlap_disable_qkv": True},
        ),
    ],
)
def test_none_is_off(changes: dict[str, Any], switched: dict[str, bool]) -> None:
    assert switches_of(edited(**changes)) == switches_of(None) | switched
    assert unswitchable(edited(**changes)) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fc2_fprop": None}, "fc2_fprop=None turns off one overlap, but proj_fprop is on\\. .*tp_comm_overlap_rs"),
        ({"proj_dgrad": None}, "proj_dgrad=None turns off one overlap, but fc2_dgrad is on\\. .*tp_comm_overlap_ag"),
        ({"proj_dgrad": None, "fc2_dgrad": None}, "proj_dgrad=None and fc2_dgrad=None .* but qkv_fprop is on"),
        ({"fc1_wgrad": None}, "fc1_wgrad=None turns off one overlap, but qkv_wgrad is on\\. .*tp_comm_bulk_wgrad"),
        ({"qkv_dgrad": None}, "qkv_dgrad=None turns off one overlap, but fc1_dgrad is on\\. .*tp_comm_bulk_dgrad"),
        (
            {"fc1_dgrad": PIPELINED, "fc1_wgrad": None, "fc1_fprop": None},
            "fc1_fprop=None turns off one overlap, but fc1_dgrad scatters\\. .*tp_comm_overlap_disable_fc1, turns both off",
        ),
    ],
)
def test_what_no_switch_can_turn_off_alone_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        decisions(edited(**changes))


def test_what_a_dict_leaves_out_is_as_transformer_engine_does_it() -> None:
    assert switches_of({"qkv_fprop": RingExchangeOverlapCfg()}) == switches_of(None)
    assert switches_of({"qkv_fprop": None}) == switches_of(None) | {"tp_comm_overlap_disable_qkv": True}


def test_a_switch_set_by_hand_may_turn_more_off_and_no_more_on() -> None:
    assert decisions(preset(FULL), tp_comm_bulk_wgrad=False)["tp_comm_bulk_wgrad"].value is False
    scattered = edited(fc1_dgrad=PIPELINED, qkv_dgrad=PIPELINED, fc1_wgrad=None, qkv_wgrad=None)
    with pytest.raises(
        ConfigError, match=r"tp_comm_bulk_dgrad=True contradicts .* qkv_dgrad and fc1_dgrad require False"
    ):
        decisions(scattered, tp_comm_bulk_dgrad=True)
    with pytest.raises(ConfigError, match=r"tp_comm_overlap_rs_dgrad=True contradicts"):
        decisions(preset(FULL), tp_comm_overlap_rs_dgrad=True)
    with pytest.raises(ConfigError, match=r"tp_comm_overlap_rs_dgrad=False contradicts"):
        decisions(edited(fc1_dgrad=PIPELINED, fc1_wgrad=None), tp_comm_overlap_rs_dgrad=False)
    assert BulkOverlapCfg(1, 1, False).method == "bulk"
