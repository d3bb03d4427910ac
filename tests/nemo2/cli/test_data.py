# SPDX-License-Identifier: Apache-2.0
"""A recipe on the user's data: by --data, by an override, and what is said while it is on random tokens."""

from pathlib import Path

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


@pytest.fixture
def shown(command):
    """The data of a recipe that is shown with these changes."""
    return lambda *arguments: command("show", *arguments, "--json").json["data"]


@pytest.mark.parametrize("suffix", ["", ".bin"])
def test_data_of_ones_own_take_the_recipes_sizes_and_the_tokenizer_beside_them(suffix, tokens, shown):
    data = shown("llama3_8b", "--data", tokens + suffix, "data.split=90,10,0")
    assert data["_target_"].endswith(PreTrainingDataModule.__name__) and data["paths"] == tokens
    assert (data["seq_length"], data["micro_batch_size"], data["global_batch_size"]) == (8192, 1, 512)
    assert data["tokenizer"]["_target_"].endswith(BPETokenizer.__name__) and data["split"] == "90,10,0"


def test_a_recipe_on_data_of_ones_own_is_legal_and_its_data_are_read(tokens, command):
    import fiddle

    from nemo2.cli.sources import configured

    recipe = configured("llama_tiny", ["data.num_train_samples=4", "data.num_val_samples=0"], data=tokens)
    data = fiddle.build(recipe.data)
    datasets = data.build_datasets(["train"])
    assert datasets["train"] is not None and len(datasets["train"][0]["tokens"]) == recipe.data.seq_length == 128
    command("check llama_tiny --data", tokens)


def test_samples_to_fine_tune_on_are_a_file(tmp_path, shown):
    (tmp_path / "chats.jsonl").write_text('{"input": "a", "output": "b"}\n')
    data, own = shown("llama3_8b:lora", "--data", tmp_path / "chats.jsonl"), shown("llama3_8b:lora")
    assert data["_target_"].endswith("HFDatasetDataModule")
    assert (data["seq_length"], data["global_batch_size"]) == (own["seq_length"], own["global_batch_size"])


@pytest.mark.parametrize(
    ("record", "kept"),
    [
        ('{"input": "a", "output": "b"}', {"add_bos": True}),
        ('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}', None),
        ('{"input_ids": [1, 2, 3]}', None),
    ],
)
@pytest.mark.parametrize("folder", [False, True])
def test_prompts_of_ones_own_begin_as_the_model_needs_it(record, kept, folder, tmp_path, shown):
    (tmp_path / "training.jsonl").write_text(record + "\n")
    path = tmp_path if folder else tmp_path / "training.jsonl"
    assert shown("gemma2_2b:lora", "--data", path).get("dataset_kwargs") == kept
    assert shown("gemma2_2b:lora", f"data=HFDatasetDataModule(path_or_dataset={path})").get("dataset_kwargs") == kept


@pytest.mark.parametrize(
    ("data", "kept"),
    [
        ("FineTuningDataModule(dataset_root=pairs)", {"add_bos": True}),
        (
            "FineTuningDataModule(dataset_root=pairs,dataset_kwargs={'add_eos':False})",
            {"add_eos": False, "add_bos": True},
        ),
        ("FineTuningDataModule(dataset_root=pairs,dataset_kwargs={'add_bos':False})", {"add_bos": False}),
        ("ChatDataModule(dataset_root=chats)", None),
    ],
)
def test_other_data_by_an_override_begin_as_the_model_needs_it(data, kept, shown):
    assert shown("gemma2_2b:lora", f"data={data}").get("dataset_kwargs") == kept


def test_token_files_are_none_to_fine_tune_on(tokens, command):
    told = command("finetune llama3_8b --dryrun --data", tokens, code=2).err
    assert f"--data {tokens}" in told and "nemo2 pretrain" in told


def test_a_tokenizer_that_nobody_names_is_asked_for(tokens, tmp_path, shown, command):
    for suffix in (".bin", ".idx", ".json"):
        (tmp_path / f"mine{suffix}").write_bytes(Path(f"{tokens}{suffix}").read_bytes())
    assert "BPETokenizer(path=tokenizer.json)" in command("check llama3_8b --data", tmp_path / "mine", code=2).out
    named = f"data.tokenizer=BPETokenizer(path={tokens}_tokenizer.json)"
    assert shown("llama3_8b", "--data", tmp_path / "mine", named)["tokenizer"]


def test_other_data_by_an_override_keep_the_recipes_sizes(shown):
    data = shown("llama3_8b", "data=PreTrainingDataModule", "data.paths=x")
    assert (data["seq_length"], data["micro_batch_size"], data["global_batch_size"]) == (8192, 1, 512)
    data = shown("llama3_8b", "data=MockDataModule(seq_length=16,tokenizer=None)")
    assert (data["seq_length"], data["global_batch_size"], data["tokenizer"]) == (16, 512, None)


@pytest.mark.parametrize(("steps", "said"), [(50, False), (51, True), (-1, True)])
def test_a_run_on_random_tokens_says_so(steps, said, capsys):
    recipe = llama3_8b.pretrain_recipe()
    recipe.trainer.max_steps = steps
    assert recipe.data.__fn_or_cls__ is MockDataModule
    _warn_of_random_data(recipe)
    assert ("random tokens (MockDataModule)" in capsys.readouterr().err) is said
