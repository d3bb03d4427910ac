# SPDX-License-Identifier: Apache-2.0
"""Modules that are trained in full beside adapters: alike in every layout, saved with them, refused where they aren't there."""

from typing import Any

import pytest
import torch
from torch import nn

from nemo2.base.errors import ConfigError
from nemo2.models.conversion.families import modules_with_weights
from nemo2.models.peft import CanonicalLoRA, LoRA
from nemo2.models.walker import linear_layers
from support import adapted_runs, small_runs, transformed_runs
from support.transformed_runs import STEPS

TIED: dict[str, Any] = {"share_embeddings_and_output_weights": True}
OPTIONS = {
    "modules_to_save": ["word_embeddings", "*_layernorm", "*.layers.1.mlp"],
    "exclude_modules": ["*.layers.1.mlp.*"],
}
LAYOUTS = ("tp2 sp", "pp2", "fsdp2")
RESUMED = ("tp2 sp", "pp2")


def train(directory: str, name: str = "", **run: Any) -> dict[str, Any]:
    """A run whose checkpoints hold what is trained, as those of `llm.finetune` do."""
    strategy = adapted_runs.LAYOUTS.get(name, {}) | {"ckpt_save_part": "trained"}
    return adapted_runs.train(directory, "LoRA", name, options=OPTIONS, strategy=strategy, **TIED, **run)


def one_process(directory: str) -> dict[str, Any]:
    transformed_runs.base(f"{directory}/tied", **TIED)
    found = {"run": train(f"{directory}/tied", to=f"{directory}/saved", save=True)}
    return found | {"resumed": train(f"{directory}/tied", resume=f"{directory}/saved/one/step={STEPS}")}


def two_ranks(directory: str) -> dict[Any, Any]:
    found: dict[Any, Any] = {name: train(f"{directory}/tied", name) for name in LAYOUTS}
    for name in RESUMED:
        found[name, "resumed"] = train(f"{directory}/tied", name, resume=f"{directory}/saved/one/step={STEPS}")
    return found


@pytest.fixture(scope="module")
def runs(run_on_ranks, tmp_path_factory) -> dict[str, Any]:
    directory = str(tmp_path_factory.mktemp("in full"))
    return {"one": run_on_ranks(one_process, 1, directory)[0], "two": run_on_ranks(two_ranks, 2, directory)}


def test_what_is_named_is_trained_and_nothing_else(runs):
    changed, same = runs["one"]["run"]["changed"], runs["one"]["run"]["same"]
    in_full = [name for name in changed if ".adapter." not in name]
    assert all("word_embeddings" in name or "layernorm" in name or ".layers.1.mlp." in name for name in in_full)
    assert len(in_full) == 1 + 2 * 4 + 1 + 2  # the embedding, two norms of each layer, the last one, a feed-forward
    assert not any("layernorm" in name or "embedding" in name or ".adapter." in name for name in same)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_as_one_process(runs, name):
    """The output layer of the last pipeline stage is a copy of the embedding, and stays one."""
    expected = runs["one"]["run"]
    assert len(set(expected["losses"])) == STEPS
    for rank in runs["two"]:
        assert rank[name]["losses"] == pytest.approx(expected["losses"], rel=2e-5)
        assert rank[name]["grad_norms"] == pytest.approx(expected["grad_norms"], rel=1e-4)


@pytest.mark.parametrize("name", RESUMED)
def test_a_layout_goes_on_from_a_checkpoint_of_one_process(runs, name):
    for rank in runs["two"]:
        assert rank[name, "resumed"]["losses"] == pytest.approx(runs["one"]["resumed"]["losses"], rel=5e-5)


def test_a_norm_that_is_fused_with_its_linear_layer_is_trained_by_its_own_name():
    """As in Transformer Engine's layers; the layer's own name leaves it frozen."""

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.layer_norm_weight = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
            self.requires_grad_(False)

    for named, trained in (("input_layernorm", "layer_norm_weight"), ("linear_qkv", "weight")):
        method = LoRA(target_modules=["linear_proj"], modules_to_save=[named])
        layer = method.transform(Fused(), name="linear_qkv", prefix="decoder.layers.0.self_attention")
        assert [name for name, parameter in layer.named_parameters() if parameter.requires_grad] == [trained]


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (lambda: LoRA(modules_to_save=["lm_head"]), "'lm_head' matches no module with weights in this model"),
        (lambda: LoRA(modules_to_save=["output_layer"]), "name word_embeddings"),
        (lambda: LoRA(modules_to_save=["linear_fc1"]), "linear_fc1 in full, and peft.target_modules"),
        (lambda: CanonicalLoRA(modules_to_save=["*.layers.0.mlp"]), "layers.0.mlp.linear_fc1 in full"),
    ],
)
def test_a_module_that_is_not_there_or_has_an_addition_is_refused_before_anything_is_built(method, words):
    config = small_runs.build_llama(**TIED).config
    with pytest.raises(ConfigError, match=words):
        made = method()
        made.refuse_unknown_targets(linear_layers(config))
        made.refuse_unknown_modules(modules_with_weights(config))
