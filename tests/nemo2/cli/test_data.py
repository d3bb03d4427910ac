# SPDX-License-Identifier: Apache-2.0
"""A recipe on the user's data: by --data, by an override, and what is said while it is on random tokens."""

import json
from pathlib import Path
from typing import Any

import pytest

from nemo2.cli.app import main
from nemo2.data import BPETokenizer, MockDataModule, PreTrainingDataModule
from nemo2.launch.launcher import _warn_of_random_data
from nemo2.recipes import llama3_8b


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Token files with their tokenizer, as `nemo2 data prepare` writes them."""
    folder = tmp_path_factory.mktemp("tokens")
    (folder / "a.txt").write_text("one two three four five " * 200)
    assert main(["data", "prepare", str(folder / "a.txt"), "--output", str(folder / "mine"), "--train-bpe", "300"]) == 0
    return str(folder / "mine")


def shown(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["show", *arguments, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)["data"]


@pytest.mark.parametrize("suffix", ["", ".bin"])
def test_data_of_ones_own_take_the_recipes_sizes_and_the_tokenizer_beside_them(
    suffix: str, tokens: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = shown(["llama3_8b", "--data", tokens + suffix, "data.split=90,10,0"], capsys)
    assert data["_target_"].endswith(PreTrainingDataModule.__name__) and data["paths"] == tokens
    assert (data["seq_length"], data["micro_batch_size"], data["global_batch_size"]) == (8192, 1, 512)
    assert data["tokenizer"]["_target_"].endswith(BPETokenizer.__name__) and data["split"] == "90,10,0"


def test_a_recipe_on_data_of_ones_own_is_legal_and_its_data_are_read(
    tokens: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import fiddle

    from nemo2.cli.sources import configured

    recipe = configured("llama_tiny", ["data.num_train_samples=4", "data.num_val_samples=0"], data=tokens)
    data = fiddle.build(recipe.data)
    datasets = data.build_datasets(["train"])
    assert datasets["train"] is not None and len(datasets["train"][0]["tokens"]) == recipe.data.seq_length == 128
    assert main(["check", "llama_tiny", "--data", tokens]) == 0


def test_samples_to_fine_tune_on_are_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "chats.jsonl").write_text('{"input": "a", "output": "b"}\n')
    data = shown(["llama3_8b:lora", "--data", str(tmp_path / "chats.jsonl")], capsys)
    own = shown(["llama3_8b:lora"], capsys)
    assert data["_target_"].endswith("HFDatasetDataModule")
    assert (data["seq_length"], data["global_batch_size"]) == (own["seq_length"], own["global_batch_size"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data", "no/such"], "there is no no/such.bin. `nemo2 data prepare TEXT --output no/such"),
        (["data.paths=x"], "To train on yours, pass --data PATH"),
    ],
)
@pytest.mark.parametrize("recipe", ["llama3_8b", "llama_tiny"])  # random tokens, and text that it makes itself
def test_data_that_are_not_there_are_told_with_the_way_to_have_some(
    recipe: str, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pretrain", recipe, *arguments]) == 2
    assert words in capsys.readouterr().err


def test_data_of_the_other_kind_are_told_with_their_command(
    tokens: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    for command, data, right in (
        (["finetune", "llama3_8b"], tokens, "nemo2 pretrain"),
        (["pretrain", "llama_tiny"], str(chats), "nemo2 finetune"),
    ):
        assert main([*command, "--data", data, "--dryrun"]) == 2
        told = capsys.readouterr().err
        assert f"--data {data}" in told and right in told


def test_data_in_the_place_of_a_recipe_are_told_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"input": "a", "output": "b"}\n')
    assert main(["finetune", "--from", "x", str(chats)]) == 2
    assert f"--data {chats}" in capsys.readouterr().err
    assert main(["finetune", "--from", "x", "no_such.jsonl"]) == 2
    assert "no such file" in capsys.readouterr().err


def test_a_tokenizer_that_nobody_names_is_asked_for(
    tokens: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for suffix in (".bin", ".idx", ".json"):
        (tmp_path / f"mine{suffix}").write_bytes(Path(f"{tokens}{suffix}").read_bytes())
    assert main(["show", "llama3_8b", "--data", str(tmp_path / "mine")]) == 2
    assert "set the tokenizer that made them" in capsys.readouterr().err
    named = f"data.tokenizer=BPETokenizer(path={tokens}_tokenizer.json)"
    assert shown(["llama3_8b", "--data", str(tmp_path / "mine"), named], capsys)["tokenizer"]


def test_other_data_by_an_override_keep_the_recipes_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    data = shown(["llama3_8b", "data=PreTrainingDataModule", "data.paths=x"], capsys)
    assert (data["seq_length"], data["micro_batch_size"], data["global_batch_size"]) == (8192, 1, 512)
    data = shown(["llama3_8b", "data=MockDataModule(seq_length=16,tokenizer=None)"], capsys)
    assert (data["seq_length"], data["global_batch_size"], data["tokenizer"]) == (16, 512, None)


@pytest.mark.parametrize(("steps", "said"), [(50, False), (51, True), (-1, True)])
def test_a_run_on_random_tokens_says_so(steps: int, said: bool, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = llama3_8b.pretrain_recipe()
    recipe.trainer.max_steps = steps
    assert recipe.data.__fn_or_cls__ is MockDataModule
    _warn_of_random_data(recipe)
    assert ("random tokens (MockDataModule)" in capsys.readouterr().err) is said
