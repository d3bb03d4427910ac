# SPDX-License-Identifier: Apache-2.0
"""Userbuffer settings: NeMo's names, Transformer Engine's rules, and which preset fits which run."""

import copy
from typing import Any

import fiddle as fdl
import pytest
from fiddle.experimental.dataclasses import convert_dataclasses_to_configs

from nemo2 import recipes
from nemo2.base.errors import ConfigError
from nemo2.config import Config, from_json, to_json
from nemo2.mcore.overlap.presets import PRESETS, Job, choose_userbuffers, find_preset, preset, preset_names
from nemo2.mcore.overlap.tp_overlap_cfg import (
    BulkOverlapCfg,
    PipelineOverlapCfg,
    RingExchangeOverlapCfg,
    TransformerLayerTPOverlapCfg,
    userbuffer_settings,
)

JOB = Job("bf16", "h100", 8192, 4, 1, 1, 8192)


def test_settings_reach_transformer_engine_without_what_is_unset() -> None:
    given = TransformerLayerTPOverlapCfg(
        qkv_fprop=RingExchangeOverlapCfg(num_sm=2),
        proj_fprop=PipelineOverlapCfg(16, 2, 4, True),
        qkv_dgrad=BulkOverlapCfg(4, 2, False),
    )
    settings = userbuffer_settings(given)
    assert settings is not None and list(settings) == ["qkv_dgrad", "qkv_fprop", "proj_fprop"]
    assert settings["qkv_dgrad"] == {"num_sm": 4, "cga_size": 2, "set_sm_margin": False, "method": "bulk"}
    assert settings["proj_fprop"]["num_splits"] == 4 and settings["proj_fprop"]["fp8_buf"] is False
    assert userbuffer_settings({"qkv_fprop": {"num_sm": 2}, "fc2_fprop": None}) == {"qkv_fprop": {"num_sm": 2}}
    assert userbuffer_settings(None) is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"qkv_forward": {}}, r"qkv_forward: Transformer Engine has no such GEMM.*qkv_fprop"),
        ({"fc1_fprop": PipelineOverlapCfg(16, 2, 4, True)}, "fc1_fprop: this GEMM does not support method 'pipeline'"),
        ({"fc2_fprop": BulkOverlapCfg(4, 2, False)}, "fc2_fprop: this GEMM does not support method 'bulk'"),
        ({"qkv_wgrad": RingExchangeOverlapCfg()}, "qkv_wgrad: this GEMM does not support method 'ring_exchange'"),
        (
            {"fc1_dgrad": PipelineOverlapCfg(16, 2, 4, True), "fc1_wgrad": BulkOverlapCfg(4, 2, False)},
            "fc1_wgrad must be None when fc1_dgrad uses 'pipeline'",
        ),
        ({"qkv_fprop": {"num_sm": 0}}, "num_sm=0: must be a whole number"),
        ({"qkv_fprop": 3}, "must be a BulkOverlapCfg, RingExchangeOverlapCfg or PipelineOverlapCfg"),
        (3, "must be a TransformerLayerTPOverlapCfg, the name of a preset, or a dict"),
    ],
)
def test_what_transformer_engine_would_refuse_is_refused_before_a_gpu_is_there(settings: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        userbuffer_settings(settings)


def test_all_faults_of_a_layer_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        TransformerLayerTPOverlapCfg(fc2_fprop=BulkOverlapCfg(4, 2, False), qkv_wgrad=RingExchangeOverlapCfg())
    assert len(str(refused.value).splitlines()) == 2


def test_atomic_products_need_fp8() -> None:
    settings = {"qkv_fprop": RingExchangeOverlapCfg(atomic_gemm=True)}
    assert userbuffer_settings(settings, quantized=True)
    with pytest.raises(ConfigError, match="atomic_gemm=True requires fp8"):
        userbuffer_settings(settings, quantized=False)


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_preset_is_under_nemos_name_and_obeys_transformer_engine(name: str) -> None:
    from nemo2.recipes.tp_overlap_configs import userbuffers

    settings = getattr(userbuffers, name)
    assert settings == preset(name) and settings is not preset(name)
    assert userbuffer_settings(settings, quantized="fp8" in name)
    one = PRESETS[name].job
    for part in (one.gpu, one.dtype, f"h{one.hidden_size}", f"tp{one.tensor_parallel}", f"seqlen{one.seq_length}"):
        assert part in name.split("_")


def test_editing_a_preset_does_not_reach_the_next() -> None:
    first = preset("userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192")
    unchanged = copy.deepcopy(first)
    assert isinstance(first.qkv_fprop, RingExchangeOverlapCfg) and isinstance(first.proj_fprop, PipelineOverlapCfg)
    first.qkv_fprop.num_sm = first.proj_fprop.num_sm = 7
    assert preset("userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192") == unchanged
    assert first.fc1_fprop == RingExchangeOverlapCfg(), "nor the other GEMMs"


@pytest.mark.parametrize("name", [name for name in PRESETS if "lora" not in name])
def test_the_preset_of_a_run_is_found_by_what_it_was_tuned_for(name: str) -> None:
    one = PRESETS[name]
    assert find_preset(one.job) == one
    for field, other in (
        ("hidden_size", 4096),
        ("tensor_parallel", 16),
        ("micro_batch_size", 3),
        ("seq_length", 512),
        ("gpu", "a100"),
    ):
        assert find_preset(one.job._replace(**{field: other})) is None, field


def test_gpus_of_one_generation_share_presets() -> None:
    assert find_preset(JOB._replace(gpu="h200")) == find_preset(JOB) is not None
    assert find_preset(JOB._replace(gpu=None)) is None


def test_what_is_asked_for_by_name_is_taken_and_what_does_not_fit_is_said() -> None:
    name = "userbuffers_bf16_h100_h12288_tp4_mbs1_seqlen2048"
    settings, reason = choose_userbuffers(JOB, name)
    assert settings == preset(name)
    assert "tuned for hidden size 12288, but the run has 8192; sequence length 2048, but the run has 8192" in reason
    assert choose_userbuffers(JOB, "default") == (None, "Transformer Engine's defaults, as requested")
    automatic, reason = choose_userbuffers(JOB, None)
    assert automatic == choose_userbuffers(JOB, "auto")[0] == preset(PRESETS[reason.split()[1].rstrip(":")].name)
    nothing, reason = choose_userbuffers(JOB._replace(hidden_size=4096), "auto")
    assert nothing is None and "no preset was tuned for h100, 16 bits, hidden size 4096" in reason
    with pytest.raises(
        ConfigError, match="no preset of this name; did you mean 'userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192'"
    ):
        choose_userbuffers(JOB, "userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen819")
    assert len(preset_names()) == 19


def test_a_preset_becomes_a_config_as_performance_scripts_make_it() -> None:
    name = "userbuffers_bf16_h100_h12288_tp4_mbs1_seqlen2048"
    config = fdl.cast(Config, convert_dataclasses_to_configs(preset(name)))
    assert fdl.build(from_json(to_json(config))) == preset(name)


def test_settings_travel_in_a_recipe() -> None:
    from nemo2.callbacks import MegatronCommOverlapCallback

    recipe = recipes.get("llama_tiny").pretrain_recipe()
    settings = preset("userbuffers_fp8_h100_h16384_tp4_mbs1_seqlen2048_lora")
    recipe.trainer.callbacks.append(MegatronCommOverlapCallback(tp_comm_overlap=True, tp_comm_overlap_cfg=settings))
    node = from_json(to_json(recipe)).trainer.callbacks[-1]
    assert fdl.build(node).tp_comm_overlap_cfg == settings
    by_hand = Config(TransformerLayerTPOverlapCfg, qkv_fprop=Config(RingExchangeOverlapCfg, num_sm=3))
    assert userbuffer_settings(fdl.build(by_hand))["qkv_fprop"]["num_sm"] == 3  # pyright: ignore[reportOptionalSubscript]
