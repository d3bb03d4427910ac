# SPDX-License-Identifier: Apache-2.0
"""`Checkpoint.open`: one model as a release, as nemo2's checkpoint and as NeMo's gives the same answers."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from nemo2 import llm
from nemo2.base.errors import CheckpointError, ConfigError
from nemo2.checkpoint.directory import Manifest, write_manifest
from nemo2.hugging_face.checkpoint import Checkpoint, find_checkpoint
from support.foreign_checkpoints import torch_dist
from tests.nemo2.hugging_face.test_api import imported, of_nemo, released

__all__ = ["imported", "released"]

# Torch says on every call that it was told to work without ranks.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture(scope="module")
def of_each_format(released: Path, imported: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    nemo = of_nemo(imported, tmp_path_factory.mktemp("nemo") / "nemo--step=3")
    torch.save({}, nemo / "weights" / "common.pt")  # what of a checkpoint is no tensor: NeMo always writes it
    return {"Hugging Face": released, "nemo2": imported, "NeMo 2.0": nemo}


def test_each_format_describes_the_same_model_tokenizer_and_tensors(of_each_format: dict[str, Path]) -> None:
    opened = {kind: Checkpoint.open(path) for kind, path in of_each_format.items()}
    assert {kind: one.kind for kind, one in opened.items()} == {kind: kind for kind in opened}
    models = [one.model() for one in opened.values()]
    assert {type(model) for model in models} == {llm.LlamaModel}
    assert (
        len({(model.config.num_layers, model.config.hidden_size, model.tokenizer.vocab_size) for model in models}) == 1
    )
    expected = opened["Hugging Face"].tensors()
    for kind in ("nemo2", "NeMo 2.0"):
        tensors = opened[kind].tensors()
        assert [entry.key for entry in tensors.entries] == [entry.key for entry in expected.entries]
        for entry in tensors.entries:
            assert torch.equal(tensors.values(entry), expected.values(entry)), entry.key


def test_the_identity_differs_for_another_description_of_the_same_weights(
    released: Path, imported: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(released, copy)
    first, second = Checkpoint.open(released), Checkpoint.open(f"hf://{copy}")
    assert first.identity == second.identity and Checkpoint.open(imported).identity not in ("", first.identity)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rope_theta": 1.0}))
    other = Checkpoint.open(copy)
    assert other.digest == first.digest and other.identity != first.identity


def completions(paths: list[str]) -> list[list[int]]:
    return [
        llm.generate(path=path, prompts=["w1 w2 w3"], max_new_tokens=6, temperature=0.0)[0].token_ids for path in paths
    ]


def test_each_format_completes_a_prompt_with_the_same_tokens(run_on_ranks, of_each_format: dict[str, Path]) -> None:
    (found,) = run_on_ranks(completions, 1, [str(path) for path in of_each_format.values()])
    assert found[0] == found[1] == found[2] and len(found[0]) > 0


def test_the_source_is_what_a_run_can_start_from(of_each_format: dict[str, Path]) -> None:
    for kind, path in of_each_format.items():
        checkpoint = Checkpoint.open(path)
        assert checkpoint.source == (f"hf://{path}" if kind == "Hugging Face" else str(path))
        assert Checkpoint.open(checkpoint.source) == checkpoint
        assert bool(checkpoint.digest) == (kind != "NeMo 2.0")


def test_a_use_that_needs_nemo2s_format_refuses_the_others(of_each_format: dict[str, Path], tmp_path: Path) -> None:
    for kind in ("Hugging Face", "NeMo 2.0"):
        with pytest.raises(CheckpointError, match="nemo2 import"):
            find_checkpoint(of_each_format[kind])
    with pytest.raises(CheckpointError, match="nothing to export"):
        llm.export_ckpt(of_each_format["Hugging Face"], output_path=tmp_path / "out")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="damaged: config.json"):
        llm.export_ckpt(tmp_path / "broken", output_path=tmp_path / "out")
    torch_dist(tmp_path / "megatron" / "iter_0000010", weight=torch.ones(2))
    (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").write_text("10\n")
    with pytest.raises(ConfigError, match="does not describe its model"):
        Checkpoint.open(tmp_path / "megatron").model()


def test_adapters_name_the_weights_that_they_belong_to(tmp_path: Path) -> None:
    write_manifest(tmp_path, Manifest(step=1, consumed_samples=0, layout={}, part_of="hf://a/b"))
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.base == "hf://a/b"
    with pytest.raises(ConfigError, match="nemo2 export .* --merge"):
        checkpoint.refuse_adapters()


def test_a_path_without_a_checkpoint_is_refused_with_what_to_give(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(CheckpointError, match=f"{path} .*run's directory"):
            Checkpoint.open(path)


def test_a_folder_of_runs_means_the_newest_run_and_a_run_its_latest_step(tmp_path: Path) -> None:
    for run, step, saved_at in (("first", 9, 1.0), ("second", 4, 3.0), ("second", 2, 4.0)):
        folder = tmp_path / run / "checkpoints" / f"step={step}"
        folder.mkdir(parents=True)
        write_manifest(folder, Manifest(step=step, consumed_samples=0, layout={}, saved_at=saved_at))
    assert find_checkpoint(tmp_path / "first").name == "step=9"
    assert find_checkpoint(tmp_path / "second").name == "step=4"
    assert find_checkpoint(tmp_path) == tmp_path / "second" / "checkpoints" / "step=4"
