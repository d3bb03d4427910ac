# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning that can't work, as commands tell of it: before a process is started, with the line, the role, the layer."""

import json
from pathlib import Path
from typing import Any

import pytest

from nemo2.cli.app import main
from support import small_chats
from support.small_chats import say, write_lines

GOOD = {"input": "1 + 1 =", "output": "2"}


@pytest.fixture
def told(capsys):
    def tell(*arguments: Any) -> str:
        code = main([str(argument) for argument in arguments])
        found = capsys.readouterr()
        assert code != 0, found.out
        text = found.out + found.err
        assert "Traceback" not in text
        return " ".join(text.split())

    return tell


def test_a_broken_line_in_the_middle_is_named(tmp_path, told):
    lines = [json.dumps(GOOD)] * 2000
    lines[999] = '{"input": "1 + 1 =", "output": '
    (tmp_path / "training.jsonl").write_text("\n".join(lines) + "\n")
    assert "training.jsonl:1000" in told("data", "preview", tmp_path, "--all")


def test_a_missing_role_is_named_with_its_line_and_turn(tmp_path, told):
    tokenizer = small_chats.make_tokenizer(tmp_path / "tokenizer")
    assert tokenizer is not None
    write_lines(
        tmp_path / "training.jsonl", [say(("user", "red?"), ("assistant", "blue")), {"messages": [{"content": "x"}]}]
    )
    text = told("data", "preview", tmp_path, "--tokenizer", tmp_path / "tokenizer", "--all")
    assert "training.jsonl:2" in text and "role" in text


def test_a_chat_template_that_fails_says_for_which_line_and_why(tmp_path, told):
    small_chats.make_tokenizer(tmp_path / "tokenizer")
    settings = tmp_path / "tokenizer" / "tokenizer_config.json"
    changed = json.loads(settings.read_text()) | {"chat_template": "{{ raise_exception('no system prompt') }}"}
    settings.write_text(json.dumps(changed))
    for template in (tmp_path / "tokenizer").glob("*.jinja"):
        template.write_text("{{ raise_exception('no system prompt') }}")
    write_lines(tmp_path / "training.jsonl", [say(("user", "red?"), ("assistant", "blue"))])
    text = told("data", "preview", tmp_path, "--tokenizer", tmp_path / "tokenizer")
    assert "training.jsonl:1" in text and "no system prompt" in text


def test_a_set_of_which_nothing_is_left_says_why_with_counts(tmp_path, told):
    small_chats.make_tokenizer(tmp_path / "tokenizer")
    write_lines(tmp_path / "training.jsonl", [say(("user", "alone"))] * 3)
    text = told("data", "preview", tmp_path, "--tokenizer", tmp_path / "tokenizer", "--all")
    assert "no turn of the assistant" in text and "3" in text


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_a_preview_without_a_sample_is_an_error_that_names_the_file_and_why(tmp_path, capsys, as_json):
    small_chats.make_tokenizer(tmp_path / "tokenizer")
    empty, misspelled = tmp_path / "empty.jsonl", tmp_path / "misspelled.jsonl"
    empty.write_text("")
    write_lines(misspelled, [say(("user", "red?"), ("assitant", "blue"))] * 2)
    for file, words in ((empty, ("empty",)), (misspelled, ("0 samples of 2 records", "assitant"))):
        assert main(["data", "preview", str(file), "--tokenizer", str(tmp_path / "tokenizer"), *as_json]) == 2
        printed = capsys.readouterr()
        assert file.name in printed.err.splitlines()[-1] and all(word in printed.out + printed.err for word in words)


def test_a_preview_of_a_folder_without_data_names_the_folder(tmp_path, told):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "README.md").write_text("none yet")
    text = told("data", "preview", tmp_path / "notes")
    assert f"{tmp_path}/notes" in text and ".jsonl" in text and "split" not in text


def test_a_bad_line_is_told_with_the_words_that_skip_it(tmp_path, told):
    from nemo2.cli.sources import configured

    (tmp_path / "a.jsonl").write_text(json.dumps(GOOD) + "\n{\n")
    (change,) = (word for word in told("data", "preview", tmp_path / "a.jsonl").split() if "on_bad_line" in word)
    recipe = configured("llama3_8b:lora", [change.rstrip(".")], data=str(tmp_path / "a.jsonl"))
    assert recipe.data.dataset_kwargs["on_bad_line"] == "skip"
    text = told("data", "prepare", tmp_path / "a.jsonl", "--output", tmp_path / "out", "--train-bpe", "300")
    assert "a.jsonl:1" in text and "--skip-bad-lines" in text


def test_records_of_an_unknown_form_are_told_the_form_of_chats_first(tmp_path, told):
    (tmp_path / "a.jsonl").write_text(json.dumps({"chat": [{"role": "user", "content": "a"}]}) + "\n")
    text = told("data", "preview", tmp_path / "a.jsonl")
    assert "chat" in text and 0 < text.index("'messages'") < text.index("'input'")
    assert "data.dataset_kwargs.prompt_template=" in text


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (
            "peft.target_modules=[linear_qvk]",
            ("'linear_qvk' matches no linear layer of this model", "linear_qkv", "linear_fc1"),
        ),
        (
            "peft.exclude_modules=[linear_qvk]",
            (
                "peft.exclude_modules: 'linear_qvk' matches no linear layer of this model; did you mean 'linear_qkv'",
                "? Its linear",
            ),
        ),
        (
            "peft.modules_to_save=[word_embedding]",
            (
                "peft.modules_to_save: 'word_embedding' matches no module",
                "did you mean 'word_embeddings'? The modules with",
            ),
        ),
        ("peft.dim=4096", ("peft.dim=4096", "an adapter's rank can be at most")),
        ("peft.dropout=1.5", ("peft.dropout=1.5",)),
        (
            "peft.target_modules=[*.layers.90-99.*.linear_fc1]",
            ("'*.layers.90-99.*.linear_fc1' matches no linear layer",),
        ),
    ],
)
def test_adapters_that_do_not_fit_are_told_by_check_and_by_the_run_itself(setting, words, told):
    base = f"resume.restore_config.path={Path(__file__).parent}"
    for command in (["check"], ["finetune"]):
        name = "llama_tiny:lora" if command == ["check"] else "llama_tiny"
        text = told(
            *command, name, setting, base, *(["--devices", "2"] if command == ["finetune"] else ["--gpus", "H100x2"])
        )
        assert all(word in text for word in words), text


def test_a_base_that_is_not_there_and_a_method_that_is_none(told):
    assert "resume.restore_config.path=/no/such/place" in told(
        "finetune", "llama_tiny", "resume.restore_config.path=/no/such/place", "--devices", "2"
    )
    assert "lora" in told("finetune", "llama_tiny", "--peft", "lorra")
