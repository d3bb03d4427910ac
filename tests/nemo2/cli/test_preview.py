# SPDX-License-Identifier: Apache-2.0
"""``nemo2 data preview``: what is trained on is marked, whatever the samples come from."""

import json
import logging

import pytest

from nemo2.cli.preview import marked, tokenizer_called
from nemo2.data.finetuning.sample import Sample
from nemo2.data.tokenizer import AutoTokenizer, BPETokenizer, ByteTokenizer
from support import small_chats
from support.small_chats import say, write_lines


@pytest.fixture
def root(tmp_path):
    small_chats.make_tokenizer(tmp_path / "tokenizer")
    chats = [
        say(("user", "red?"), ("assistant", "blue")),
        say(("user", "alone")),
        say(("user", "x"), ("assistant", "y")),
    ]
    write_lines(tmp_path / "chats" / "training.jsonl", chats)
    write_lines(tmp_path / "sums" / "training.jsonl", [{"input": "1 + 1 =", "output": "2"}] * 3)
    return tmp_path


@pytest.fixture
def shown(command):
    return lambda *arguments: command("data preview", *arguments).out


def test_conversations_by_the_tokenizers_template(root, shown):
    text = shown(root / "chats", "--tokenizer", root / "tokenizer", "--samples", 1)
    assert text.endswith("<|im_start|>user\nred?<|im_end|>\n<|im_start|>assistant\n⟦blue<|im_end|>⟧\n\n\n")
    assert f"{root}/chats/training.jsonl:1: 16 tokens, 5 trained on" in text or "training.jsonl:1:" in text


def test_what_is_left_out_is_shown_in_its_place(root, shown):
    text = shown(root / "chats", "--tokenizer", root / "tokenizer", "--all")
    assert "training.jsonl:2: no turn of the assistant" in text and "⟦y<|im_end|>⟧" in text
    assert "2 samples of 3 records" in text


def test_samples_as_json(root, command, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    arguments = ["--tokenizer", str(root / "tokenizer"), "--json"]
    printed = command("data preview", root / "chats", *arguments, "--all")
    told = json.loads(printed.out)
    first, second = told["samples"]
    assert first["tokens"] == len(first["ids"]) == len(first["trained"])
    assert first["trained_tokens"] == sum(first["trained"][1:]) > 0 and not first["truncated"]
    assert first["text"].endswith("blue<|im_end|>\n") and second["place"].endswith("training.jsonl:3")
    assert told["report"]["records"] == 3 and "training.jsonl:2: no turn" in printed.err


def test_files_take_the_changes_that_a_recipe_takes(root, shown):
    file = root / "sums" / "training.jsonl"
    file.write_text(f"{{\n{file.read_text('utf-8')}", "utf-8")
    changes = ("data.dataset_kwargs.on_bad_line=skip", "data.dataset_kwargs.prompt_template='{input} is {output}'")
    of_file = shown(file, *changes, "--samples", 1)
    assert "training.jsonl:2: " in of_file and "1 + 1 = is⟦ 2<eos>⟧" in of_file
    tokenizer = ["--tokenizer", root / "tokenizer", "--samples", 1]
    of_recipe = shown("llama_tiny:lora", "--data", file, *changes, *tokenizer)
    assert of_recipe == shown(file, *changes, *tokenizer)


def test_files_in_bytes_without_a_tokenizer(root, shown):
    assert "1 + 1 =⟦ 2<eos>⟧" in shown(root / "sums" / "training.jsonl", "--samples", 1)


@pytest.mark.parametrize(("name", "meant"), [("squads", "did you mean 'squad'"), ("chatz", "data set or recipe")])
def test_a_misspelled_name_may_be_of_a_file_or_data_too(command, name, meant):
    error = command(f"data preview {name}", code=2).err
    assert f"{name}: there is no file, folder" in error and meant in error


def test_the_data_of_a_recipe_and_data_by_name(root, shown):
    sizes = "seq_length=64,global_batch_size=4,micro_batch_size=1"
    by_name = f"FineTuningDataModule(dataset_root={root}/sums,{sizes})"
    packed = f"{by_name[:-1]},packed_sequence_specs=PackedSequenceSpecs(packed_sequence_size=64))"
    tokenizer = ["--tokenizer", root / "tokenizer", "--samples", 1]
    assert "⟦ 2<|im_end|>⟧" in shown(by_name, *tokenizer)
    text = shown("llama_tiny", f"data={packed}", *tokenizer, "--all")
    assert "⟦ 2<|im_end|>⟧" in text and "3 samples in 1 row," in text


def test_colours_mark_the_same_tokens():
    sample = Sample(list(b"ab cd"), [False, False, False, True, True])
    text = marked(sample, ByteTokenizer(), colours=True)
    assert [(text.plain[span.start : span.end], span.style) for span in text.spans] == [("ab ", "dim"), ("cd", "green")]
    assert marked(sample, None, colours=False).plain == "97 98 32⟦99 100⟧"


def test_tokenizers_by_file_folder_and_name(root):
    assert isinstance(tokenizer_called(str(root / "tokenizer" / "tokenizer.json")), BPETokenizer)
    assert isinstance(tokenizer_called(str(root / "tokenizer")), AutoTokenizer)
    assert isinstance(tokenizer_called("somebody/model"), AutoTokenizer)
