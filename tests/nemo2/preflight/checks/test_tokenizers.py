# SPDX-License-Identifier: Apache-2.0
"""What ranks refuse about tokenizers, weights and earlier runs, the check refuses."""

from pathlib import Path
from typing import Any

import pytest

from nemo2 import recipes
from nemo2.checkpoint.context import tokenizer_settings, write_parts
from nemo2.checkpoint.directory import Manifest, write_manifest
from nemo2.config import Config
from nemo2.data.finetuning.hf_dataset import HFDatasetDataModule
from nemo2.data.finetuning.module import ChatDataModule
from nemo2.data.finetuning.published import SquadDataModule
from nemo2.data.mock import MockDataModule
from nemo2.data.tokenizer import AutoTokenizer, ByteTokenizer, NullTokenizer
from nemo2.preflight.checks.find import find
from support.small_chats import make_tokenizer, say, write_lines


def rules_of(recipe: Any, **where: Any) -> set[str]:
    return {problem.rule for problem in find(recipe, devices=2, chosen=True, **where)}


def checkpoint_in(folder: Path, parts: dict[Any, Any], *, settings: Any = None) -> Path:
    """A checkpoint without weights in the directory of a run, as far as a check reads it."""
    checkpoint = folder / "checkpoints" / "tiny--step=1-last"
    write_parts(checkpoint, parts)
    write_manifest(checkpoint, Manifest(step=1, consumed_samples=8, layout={}, settings=settings or {}))
    return checkpoint


def mock_data(tokenizer: Any) -> Any:
    return Config(MockDataModule, seq_length=128, micro_batch_size=8, global_batch_size=16, tokenizer=tokenizer)


def finetuning(data: Any, path: str | Path | None) -> Any:
    recipe: Any = recipes.get("llama_tiny").finetune_recipe(resume_path=None if path is None else str(path))
    recipe.data = data
    recipe.data.global_batch_size = 8
    return recipe


def test_a_vocabulary_below_the_tokenizers_is_refused_where_the_tokenizer_can_be_read(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "tokenizer", vocab_size=320)
    for tokenizer in (
        Config(ByteTokenizer),
        Config(NullTokenizer, vocab_size=319),
        Config(AutoTokenizer, str(tmp_path / "tokenizer")),
        AutoTokenizer(str(tmp_path / "tokenizer")),
    ):
        recipe: Any = recipes.get("llama_tiny").pretrain_recipe()
        assert "tokenizer-fits-the-vocabulary" not in rules_of(recipe)
        recipe.model.config.vocab_size = 100
        assert "tokenizer-fits-the-vocabulary" in rules_of(recipe)  # its data makes a tokenizer of 2,048 tokens
        recipe.data = mock_data(tokenizer)
        recipe.model.config.vocab_size = 100
        assert "tokenizer-fits-the-vocabulary" in rules_of(recipe)
        recipe.model.config.vocab_size = 512
        assert "tokenizer-fits-the-vocabulary" not in rules_of(recipe)
    recipe.data.tokenizer = Config(AutoTokenizer, "organisation/name")  # nothing is downloaded to find out
    recipe.model.config.vocab_size = 100
    assert "tokenizer-fits-the-vocabulary" not in rules_of(recipe)


def test_weights_name_the_tokenizer_of_text_by_every_path(tmp_path: Path) -> None:
    """A release, a checkpoint, and the folder of a run. Weights without a tokenizer are refused for text."""
    tokenizer = make_tokenizer(tmp_path / "release", vocab_size=320)
    (tmp_path / "bare").mkdir()
    with_one = checkpoint_in(tmp_path / "run", {"tokenizer": tokenizer})
    without = checkpoint_in(tmp_path / "plain", {"tokenizer": None})
    chats = write_lines(tmp_path / "chats.jsonl", [say(("user", "?"), ("assistant", "!"))])
    ids = write_lines(tmp_path / "ids.jsonl", [{"input_ids": [1, 2, 3]}])

    def data(file: Path) -> Any:
        return Config(HFDatasetDataModule, path_or_dataset=str(file), seq_length=128)

    rule = "text-has-a-tokenizer"
    for path in (f"hf://{tmp_path / 'release'}", with_one, tmp_path / "run", "hf://organisation/name"):
        assert rule not in rules_of(finetuning(data(chats), path))
    for path in (f"hf://{tmp_path / 'bare'}", without, tmp_path / "plain"):
        assert rule in rules_of(finetuning(data(chats), path))
        assert rule in rules_of(finetuning(Config(ChatDataModule, dataset_root=str(tmp_path), seq_length=128), path))
        assert rule not in rules_of(finetuning(data(ids), path))
        recipe = finetuning(data(chats), path)
        recipe.data.tokenizer = Config(ByteTokenizer)
        assert rule not in rules_of(recipe)
    recipe = recipes.get("llama_tiny").pretrain_recipe()
    recipe.data = Config(SquadDataModule)
    assert rule in rules_of(recipe)  # of llm.pretrain, without weights
    assert rule not in rules_of(finetuning(Config(SquadDataModule), None))  # "fine-tuning-begins-with-weights"
    recipe.data.tokenizer = Config(ByteTokenizer)
    assert rule not in rules_of(recipe)


def test_a_folder_that_holds_no_weights_is_refused_with_the_way_to_name_a_release(tmp_path: Path) -> None:
    from nemo2.checkpoint.paths import checkpoint_at, missing

    checkpoint = checkpoint_in(tmp_path / "run", {"tokenizer": None})
    assert checkpoint_at(str(tmp_path / "run")) == checkpoint and missing(str(tmp_path / "run")) is None
    (tmp_path / "empty").mkdir()
    (tmp_path / "release").mkdir()
    (tmp_path / "release" / "config.json").write_text("{}")
    for name, words in (("empty", "nemo2 show"), ("release", f"hf://{tmp_path / 'release'}")):
        assert words in str(missing(str(tmp_path / name)))
        recipe = finetuning(Config(ChatDataModule, dataset_root=str(tmp_path), seq_length=128), tmp_path / name)
        assert "checkpoint-to-resume-exists" in rules_of(recipe, local=True)


@pytest.mark.parametrize("change", ["tokenizer", "layers", "accepted", "none"])
def test_an_earlier_run_of_the_name_with_another_tokenizer_or_shape_is_refused(tmp_path: Path, change: str) -> None:
    import fiddle as fdl

    recipe: Any = recipes.get("llama_tiny").pretrain_recipe(dir=str(tmp_path), name="tiny")
    recipe.data = mock_data(Config(ByteTokenizer))
    model = fdl.build(recipe.model)
    run = tmp_path / "tiny" / "2026-01-01_00-00-00"
    checkpoint_in(run, {"model": model, "tokenizer": ByteTokenizer()}, settings=tokenizer_settings(ByteTokenizer()))
    if change in ("tokenizer", "accepted"):
        recipe.data.tokenizer = Config(NullTokenizer, vocab_size=300)
        recipe.resume.accept_changes = change == "accepted"
    elif change == "layers":
        recipe.model.config.num_layers = 6
    found = rules_of(recipe, local=True)
    assert ("recipe-fits-its-earlier-run" in found) == (change in ("tokenizer", "layers")), found


def test_every_directory_that_a_run_writes_must_be_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    recipe: Any = recipes.get("llama_tiny").pretrain_recipe(dir=str(tmp_path))
    assert "log-directory-is-writable" not in rules_of(recipe, local=True)
    recipe.log.ckpt.dirpath = str(blocked / "checkpoints")
    assert "log-directory-is-writable" in rules_of(recipe, local=True)
    recipe.log.ckpt.dirpath, recipe.log.log_dir = None, None
    monkeypatch.setattr("nemo2.preflight.checks.rules.launching.DEFAULT_BASE", str(blocked / "runs"))
    assert "log-directory-is-writable" in rules_of(recipe, local=True)
