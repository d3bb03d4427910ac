# SPDX-License-Identifier: Apache-2.0
"""Which layers the patterns of a method take, and what is refused before anything is built."""

import pytest

from nemo2.base.errors import ConfigError
from nemo2.models.peft import CanonicalLoRA, DoRA, LoRA, ModuleMatcher
from nemo2.models.peft.targets import takes
from nemo2.models.walker import linear_layers
from support import small_runs

QKV = "decoder.layers.12.self_attention.linear_qkv"
EXPERT = "decoder.layers.3.mlp.experts.local_experts.7.linear_fc1"
LAYERS = {
    QKV: (96, 64),
    "decoder.layers.12.mlp.linear_fc1": (256, 64),
    "decoder.layers.12.mlp.linear_fc2": (64, 128),
    "output_layer": (1000, 64),
}


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("linear_qkv", QKV, True),
        ("qkv", QKV, False),
        ("*qkv", QKV, True),
        ("*.layers.12.*.linear_qkv", QKV, True),
        ("*.layers.1.*.linear_qkv", QKV, False),
        ("*.layers.0-12.*", QKV, True),
        ("*.layers.0-11.*", QKV, False),
        ("decoder.layers.{4,12}.*", QKV, True),
        ("decoder.layers.{4,1}.*", QKV, False),
        ("*.layers.12.*.linear_qk?", QKV, True),
        ("*.experts.linear_fc1", EXPERT, True),
        ("*.local_experts.*.linear_fc1", EXPERT, True),
        ("*.experts.*.linear_fc1", EXPERT, True),
        ("*.local_experts.*", EXPERT, True),
        ("*.local_experts.7.linear_fc1", EXPERT, False),
        ("*7*linear_fc1", EXPERT, False),
        ("*.local_experts.0-3.*", EXPERT, False),
        ("*.layers.[12].*", QKV, False),
    ],
)
def test_a_pattern_is_a_name_or_a_full_name_with_wildcards_and_ranges(pattern, name, expected):
    assert takes(pattern, name) is expected


def test_what_is_excluded_is_left_out_and_no_targets_mean_all():
    assert ModuleMatcher([], ["*.self_attention.*"]).match("linear_fc1", "decoder.layers.0.mlp") == "*"
    assert ModuleMatcher([], ["*.self_attention.*"]).match("linear_qkv", "decoder.layers.0.self_attention") is None


@pytest.mark.parametrize(
    ("targets", "excluded", "parts"),
    [
        (["linear_q", "*.layers.12.*.linear_v"], [], 2),
        (["*.self_attention.*"], [], 3),
        (["*.linear_?"], [], 3),
        ([], [], 3),
        (["linear_q", "linear_k"], ["linear_k"], 1),
        (["linear_q", "linear_fc2"], ["linear_qkv"], 0),
    ],
)
def test_patterns_of_parts(targets, excluded, parts):
    method = CanonicalLoRA(target_modules=targets, exclude_modules=excluded)
    method.refuse_unknown_targets(LAYERS)
    assert method.num_first_factors(QKV) == parts


@pytest.mark.parametrize("kind", [LoRA, DoRA])
def test_an_unknown_target_is_refused_with_the_names_that_exist(kind):
    with pytest.raises(
        ConfigError, match=r"'linear_qvk' matches no linear layer of this model.*linear_qkv.*linear_fc1"
    ):
        kind(target_modules=["linear_fc1", "linear_qvk"]).refuse_unknown_targets(LAYERS)
    kind().refuse_unknown_targets(LAYERS)  # of the usual targets those that are there
    with pytest.raises(ConfigError, match="no linear layer of this model"):
        kind().refuse_unknown_targets({"decoder.layers.0.mixer.in_proj": (128, 64)})


@pytest.mark.parametrize("kind", [LoRA, CanonicalLoRA])
def test_targets_that_are_all_excluded_are_refused_unless_modules_are_trained_in_full(kind):
    with pytest.raises(ConfigError, match="peft.exclude_modules=.* so nothing would be trained"):
        kind(target_modules=["linear_fc2"], exclude_modules=["linear_fc2"]).refuse_unknown_targets(LAYERS)
    kind(exclude_modules=["*"], modules_to_save=["output_layer"]).refuse_unknown_targets(LAYERS)


def test_a_pattern_of_all_experts_is_met_and_one_of_some_is_refused_before_checkpoints_lack_the_others():
    layers = linear_layers(small_runs.build_llama(num_moe_experts=2).config) or {}
    method = LoRA(target_modules=["*.local_experts.*.linear_fc1"])
    method.refuse_unknown_targets(layers)
    assert method.is_beside_experts(layers)
    with pytest.raises(ConfigError, match="matches no linear layer"):
        LoRA(exclude_modules=["*.local_experts.0.linear_fc1"]).refuse_unknown_targets(layers)


def test_routers_are_no_linear_layers():
    layers = linear_layers(small_runs.build_llama(num_moe_experts=2).config) or {}
    assert any(".mlp.experts." in name for name in layers)
    with pytest.raises(ConfigError, match="'router' matches no linear layer"):
        LoRA(target_modules=["router"]).refuse_unknown_targets(layers)


@pytest.mark.parametrize("kind", [LoRA, DoRA, CanonicalLoRA])
def test_a_rank_above_that_of_a_layer_is_refused_where_the_layer_is_meant(kind):
    kind(dim=64).refuse_unknown_targets(LAYERS)
    with pytest.raises(
        ConfigError, match=r"peft.dim=65: decoder.layers.12.self_attention.linear_qkv has 64 inputs and 96"
    ):
        kind(dim=65).refuse_unknown_targets(LAYERS)
    wide = {"decoder.layers.0.mlp.linear_fc2": (512, 512), QKV: (96, 64)}
    kind(dim=65, target_modules=["linear_fc2"]).refuse_unknown_targets(wide)
    kind(dim=65, target_modules=["linear_proj", "linear_fc2"], exclude_modules=["linear_qkv"]).refuse_unknown_targets(
        {**wide, "decoder.layers.0.self_attention.linear_proj": (512, 512)}
    )


def test_canonical_lora_names_parts():
    CanonicalLoRA(target_modules=["linear_q", "*.linear_fc1_up"]).refuse_unknown_targets(LAYERS)
    with pytest.raises(ConfigError, match="linear_q, linear_k, linear_v"):
        CanonicalLoRA(target_modules=["linear_qkv"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 0}, "peft.dim=0"),
        ({"alpha": 0}, "peft.alpha=0"),
        ({"alpha": float("nan")}, "peft.alpha=nan"),
        ({"alpha": True}, "peft.alpha=True"),
        ({"dropout": "0.1"}, "peft.dropout='0.1'"),
        ({"target_modules": "linear_qkv"}, "peft.target_modules='linear_qkv': takes a list"),
        ({"modules_to_save": [None]}, r"peft.modules_to_save\[0\]=None"),
        ({"dropout": 1.0}, "peft.dropout=1.0"),
        ({"dropout_position": "before"}, "'pre' or 'post'"),
        ({"lora_A_init_method": "zero"}, "would stay zero"),
        ({"lora_A_init_method": "xaver"}, "did you mean 'xavier'"),
    ],
)
def test_settings_out_of_range_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        LoRA(**changes)


def test_layers_that_end_before_they_begin_are_refused():
    with pytest.raises(ConfigError, match="5-3"):
        takes("*.layers.5-3.*", QKV)
