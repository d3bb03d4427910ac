# SPDX-License-Identifier: Apache-2.0
"""Where released weights are, and what is said of those that don't fit; that they reach every layout is in test_round_trips."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo2.base.errors import CheckpointError, ConfigError
from nemo2.checkpoint.context import load_context
from nemo2.checkpoint.paths import folder_of
from nemo2.checkpoint.shards import Shard
from nemo2.hugging_face.released import open_released
from nemo2.hugging_face.restore import fill
from nemo2.preflight.checks.earlier import weights_of_another_shape
from support.released_models import import_release
from tests.nemo2.hugging_face.test_bad_input import weights, write

# Torch says on every call that it was told to work without ranks.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def test_a_repository_comes_from_the_hub_s_own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(repository: str, **options: Any) -> str:
        asked.update(options, repository=repository)
        return str(tmp_path)

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download))
    assert folder_of("hf://org/name@v1", local_files_only=True) == tmp_path
    assert (asked["repository"], asked["revision"], asked["local_files_only"]) == ("org/name", "v1", True)
    assert not any(pattern.endswith((".bin", ".py", "*")) for pattern in asked["allow_patterns"])


def test_paths_that_lead_nowhere_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="nowhere: the folder does not exist"):
        folder_of(f"hf://{tmp_path}/nowhere")
    with pytest.raises(ConfigError, match="write a repository as hf://organisation/name"):
        folder_of("hf://name")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        CheckpointError, match=r"hf://org/name cannot be downloaded.*Download it on a machine with a network"
    ):
        folder_of("hf://org/name", local_files_only=True)


def test_shards_that_do_not_fit_are_named_at_once_and_none_is_filled(tmp_path: Path) -> None:
    released = open_released(write(tmp_path / "hf"))
    norm, other = torch.zeros(8), torch.zeros(2)

    def shard(key: str, tensor: torch.Tensor) -> Shard:
        return Shard(key=key, tensor=tensor, offset=(0,) * tensor.dim(), global_shape=tuple(tensor.shape))

    good = shard("module.decoder.final_layernorm.weight", norm)
    bad = [
        shard("module.decoder.layers.self_attention.q_layernorm.weight", other),
        shard("module.embedding.word_embeddings.weight", torch.zeros(12, 8)),
        shard("module.output_layer.weight", torch.zeros(16, 9)),
    ]
    with pytest.raises(CheckpointError) as caught:
        fill([good, *bad], released)
    said = str(caught.value)
    assert "q_layernorm.weight has no counterpart in LlamaForCausalLM" in said
    assert "set model.config.vocab_size=16" in said and "shape [16, 9] in the model, and [16, 8] in the release" in said
    assert not norm.any()
    fill([good, bad[0]], released, also=[bad[0].key])
    assert norm.equal(weights()["model.norm.weight"]) and not other.any()


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [("rotary_base", 10000.0, False), ("rotary_base", 20000.0, True), ("window_size", (4, 0), True)],
)
def test_settings_with_which_the_weights_were_not_trained_are_told(
    tmp_path: Path, caplog: Any, field: str, value: Any, told: bool
) -> None:
    """Of a release, when it is opened, and of an imported checkpoint, before the launch."""
    source = write(tmp_path / "hf")
    ours = import_release(source, tmp_path / "ours")
    config = load_context(ours, "model").config
    setattr(config, field, value)
    open_released(source, config)
    facts: Any = types.SimpleNamespace(config=config, parts={})
    assert not list(weights_of_another_shape(facts, "resume.restore_config.path", str(ours)))
    messages = [
        record.getMessage() for record in caplog.records if "were trained with other values" in record.getMessage()
    ]
    assert [f"model.config.{field}={value}" in message for message in messages] == [True, True] * told


@pytest.mark.parametrize(("field", "value"), [("num_layers", 5), ("num_query_groups", 2), ("ffn_hidden_size", 96)])
def test_sizes_that_the_weights_do_not_have_are_refused_before_the_launch(
    tmp_path: Path, field: str, value: int
) -> None:
    ours = import_release(write(tmp_path / "hf"), tmp_path / "ours")
    config = load_context(ours, "model").config
    before = getattr(config, field)
    setattr(config, field, value)
    facts: Any = types.SimpleNamespace(config=config, parts={})
    told = list(weights_of_another_shape(facts, "resume.restore_config.path", str(ours)))
    assert len(told) == 1 and f"model.config.{field}: {before} -> {value}" in told[0]


def test_any_part_of_a_tensor_is_filled_with_what_belongs_there(tmp_path: Path) -> None:
    """Rows over the bounds of shards, columns, several layers at a time, rows of padding."""
    from support.resharding import whole_tensors

    source = write(tmp_path / "hf")
    whole = whole_tensors(import_release(source, tmp_path / "ours"))
    released = open_released(source)
    qkv, embedding = "module.decoder.layers.self_attention.linear_qkv.weight", "module.embedding.word_embeddings.weight"
    part = Shard(key=qkv, tensor=torch.ones(2, 7, 3), offset=(0, 6, 4), global_shape=(2, 16, 8))
    padded = Shard(key=embedding, tensor=torch.ones(10, 8), offset=(10, 0), global_shape=(20, 8), padded=True)
    beyond = Shard(key=embedding, tensor=torch.ones(2, 8), offset=(18, 0), global_shape=(20, 8), padded=True)
    fill([part, padded, beyond], released)
    assert part.tensor.equal(whole[qkv][:, 6:13, 4:7])
    assert padded.tensor[:6].equal(whole[embedding][10:]) and not padded.tensor[6:].any() and not beyond.tensor.any()


def test_a_checkpoint_without_the_extra_states_of_other_layers_is_read(tmp_path: Path) -> None:
    """Which layers have one differs between implementations; what the checkpoint has is still asked for."""
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject

    from nemo2.checkpoint.loading import _without_absent_extra_states
    from nemo2.checkpoint.metadata import read_metadata

    ours = import_release(write(tmp_path / "hf"), tmp_path / "ours")
    there = ShardedObject("module.decoder.layers.mlp.linear_fc1._extra_state", None, (2,), (1,))
    absent = ShardedObject("module.decoder.final_layernorm._extra_state", None, (1,), (0,))
    state = {"model_0": {"a": there, "b": absent}, "c": torch.zeros(1)}
    _without_absent_extra_states(state, read_metadata(ours / "weights").state_dict_metadata)
    assert state["model_0"]["a"] is there and isinstance(state["model_0"]["b"], LocalNonpersistentObject)


def test_check_looks_into_released_weights(tmp_path: Path) -> None:
    from nemo2 import recipes
    from nemo2.preflight.checks.find import find

    def said(path: str) -> list[str]:
        from nemo2.checkpoint.auto_resume import RestoreConfig
        from nemo2.config import Config

        recipe = recipes.get("llama_tiny").pretrain_recipe(dir=str(tmp_path), name="checked")
        recipe.resume.restore_config = Config(RestoreConfig, path=path)
        found = find(recipe, local=True)
        return [problem.message for problem in found if problem.rule == "released-weights-fit"]

    [nowhere] = dict.fromkeys(said(f"hf://{tmp_path}/nowhere"))
    assert "does not exist" in nowhere and nowhere.count(str(tmp_path)) == 1
    tied = {name: tensor for name, tensor in weights().items() if name != "lm_head.weight"}
    assert "layers.2.input_layernorm.weight is missing" in said(f"hf://{write(tmp_path / 'hf', tied)}")[0]
    assert not said("hf://org/name")
