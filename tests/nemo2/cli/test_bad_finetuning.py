# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning that can't work, as commands tell of it: before a process is started, with the line, the role, the layer."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from nemo2.cli.sources import configured
from support import small_chats
from support.small_chats import say, write_lines

GOOD = {"input": "1 + 1 =", "output": "2"}
CHAT = say(("user", "red?"), ("assistant", "blue"))
BAD_SAMPLES: dict[str, tuple[list[Any], list[str]]] = {
    "a broken line in the middle": ([*[GOOD] * 999, '{"input": "1 + 1 =", "output": ', GOOD], ["samples.jsonl:1000"]),
    "a missing role": ([CHAT, {"messages": [{"content": "x"}]}], ["samples.jsonl:2", "role"]),
    "no turn to train on": ([say(("user", "alone"))] * 3, ["no turn of the assistant", "3"]),
    "a misspelled role": (
        [say(("user", "red?"), ("assitant", "blue"))] * 2, ["assitant", "did you mean 'assistant'", "samples.jsonl:1"],
    ),
    "no line": ([], ["samples.jsonl", "empty"]),
    "an unknown form, told that of chats first": (
        [{"chat": [{"role": "user", "content": "a"}]}],
        ["chat", "'messages'.*'input'", "data.dataset_kwargs.prompt_template="],
    ),
}  # fmt: skip
"""Lines of a file, and what is said of them."""


@pytest.fixture
def told(command):
    def tell(line: str, *words: Any) -> str:
        printed = command(line, *words, code=2)
        assert "Traceback" not in printed.err
        return " ".join(f"{printed.out} {printed.err}".split())

    return tell


@pytest.fixture
def tokenizer(tmp_path) -> Path:
    small_chats.make_tokenizer(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.mark.parametrize("options", [["--all"], ["--all", "--json"]], ids=" ".join)
@pytest.mark.parametrize("case", BAD_SAMPLES)
def test_samples_that_cannot_be_are_told_with_file_line_and_why(tmp_path, told, tokenizer, case, options):
    lines, words = BAD_SAMPLES[case]
    file = tmp_path / "samples.jsonl"
    file.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    text = told("data preview", file, "--tokenizer", tokenizer, *options)
    assert all(re.search(word, text) for word in words), text


def test_a_chat_template_that_fails_says_for_which_line_and_why(tmp_path, told, tokenizer):
    settings = tokenizer / "tokenizer_config.json"
    failing = "{{ raise_exception('no system prompt') }}"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": failing}))
    for template in tokenizer.glob("*.jinja"):
        template.write_text(failing)
    write_lines(tmp_path / "training.jsonl", [CHAT])
    text = told("data preview", tmp_path, "--tokenizer", tokenizer)
    assert "training.jsonl:1" in text and "no system prompt" in text


def test_a_preview_of_a_folder_without_data_names_the_folder(tmp_path, told):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "README.md").write_text("none yet")
    text = told("data preview", tmp_path / "notes")
    assert f"{tmp_path}/notes" in text and ".jsonl" in text and "split" not in text


def test_a_bad_line_is_told_with_the_words_that_skip_it(tmp_path, told):
    (tmp_path / "a.jsonl").write_text(json.dumps(GOOD) + "\n{\n")
    (change,) = (word for word in told("data preview", tmp_path / "a.jsonl").split() if "on_bad_line" in word)
    recipe = configured("llama3_8b:lora", [change.rstrip(".")], data=str(tmp_path / "a.jsonl"))
    assert recipe.data.dataset_kwargs["on_bad_line"] == "skip"
    text = told("data prepare", tmp_path / "a.jsonl", "--output", tmp_path / "out", "--train-bpe", "300")
    assert "a.jsonl:1" in text and "--skip-bad-lines" in text


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("peft.target_modules=[linear_qvk]", ["'linear_qvk' matches no linear layer of this model", "linear_qkv"]),
        (
            "peft.exclude_modules=[linear_qvk]",
            ["peft.exclude_modules: 'linear_qvk' matches no linear layer", "did you mean 'linear_qkv'", "? Its linear"],
        ),
        (
            "peft.modules_to_save=[word_embedding]",
            ["'word_embedding' matches no module", "did you mean 'word_embeddings'? The modules with"],
        ),
        ("peft.dim=4096", ["peft.dim=4096", "an adapter's rank can be at most"]),
        ("peft.dropout=1.5", ["peft.dropout=1.5"]),
        (
            "peft.target_modules=[*.layers.90-99.*.linear_fc1]",
            ["'*.layers.90-99.*.linear_fc1' matches no linear layer"],
        ),
    ],
)
def test_adapters_that_do_not_fit_are_told_by_check_and_by_the_run_itself(setting, words, told):
    base = f"resume.restore_config.path={Path(__file__).parent}"
    for line in ("check llama_tiny:lora --gpus H100x2", "finetune llama_tiny --devices 2"):
        text = told(line, base, setting)
        assert all(word in text for word in words), text


def test_a_base_that_is_not_there_is_told(told):
    path = "resume.restore_config.path=/no/such/place"
    assert path in told("finetune llama_tiny --devices 2", path)
