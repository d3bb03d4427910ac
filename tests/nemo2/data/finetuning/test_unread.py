# SPDX-License-Identifier: Apache-2.0
"""Text of a record that its sample lacks is refused or told, wherever it stands."""

from typing import Any

import pytest

from nemo2.base.errors import DataError
from nemo2.cli.app import main
from nemo2.data.finetuning.module import FineTuningDataModule
from nemo2.data.tokenizer import AutoTokenizer, ByteTokenizer
from support import small_chats
from support.small_chats import report_of, say

UNREAD = "with fields that no sample shows"
TURNS = (("user", "hi there"), ("assistant", "yes sir"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return small_chats.make_tokenizer(tmp_path_factory.mktemp("tokenizer"), small_chats.WITH_TOOLS)


@pytest.mark.parametrize(
    "beside",
    [
        {"context": "a long document"},
        {"documents": [{"text": "another one"}]},
        {"conversations": [{"from": "human", "value": "a second list"}]},
        {"title": "several words"},
        {"mood": "glad"},
    ],
)
def test_fields_beside_messages_are_told(tokenizer: Any, beside: dict[str, Any]) -> None:
    report = report_of(tokenizer, [say(*TURNS, **beside), say(*TURNS, source="here", prompt="hi there")])
    assert report.samples == 2 and report.places == {UNREAD: [f"train[0]: {next(iter(beside))!r}"]}


def test_single_words_of_a_message_are_told_and_longer_texts_refused(tokenizer: Any) -> None:
    word, text = say(*TURNS), say(*TURNS)
    word["messages"][1]["mood"] = "glad"
    text["messages"][1]["citations"] = [{"text": "from the book"}]
    report = report_of(tokenizer, [word, text])
    assert report.places[UNREAD] == ["train[0]: 'messages[].mood'"]
    assert "the field 'citations' of message 2" in report.places["malformed"][0]


@pytest.mark.parametrize(
    "beside", [{"system": ["be nice"]}, {"images": ["a.png"]}, {"tools": [{"name": "a"}], "functions": [{"name": "b"}]}]
)
def test_contents_that_cannot_be_shown_are_malformed(tokenizer: Any, beside: dict[str, Any]) -> None:
    assert report_of(tokenizer, [say(*TURNS, **beside)]).count("malformed") == 1


def test_a_field_of_all_records_that_no_template_names_is_an_error(tokenizer: Any) -> None:
    record = {"instruction": "a b", "input": "", "output": "c"}
    with pytest.raises(DataError, match="All 3 records: the field 'system'.*prompt_template"):
        report_of(tokenizer, [{**record, "system": "Pirate"}] * 3)
    told = report_of(tokenizer, [record, {**record, "system": "Pirate"}, {**record, "title": "two words", "id": "x"}])
    assert told.places == {UNREAD: ["train[1]: 'system'", "train[2]: 'title'"]}


def test_a_field_of_the_first_records_alone_is_no_error_before_the_run(tmp_path: Any, capsys: Any) -> None:
    record = {"input": "a b", "output": "c"}
    file = small_chats.write_lines(tmp_path / "training.jsonl", [{**record, "mood": "glad"}] * 8 + [record] * 24)
    data = FineTuningDataModule(tmp_path, tokenizer=ByteTokenizer(), seq_length=64)
    for encodes in (True, False):
        data.check_records(ByteTokenizer(), encodes=encodes)
    assert main(["data", "preview", str(tmp_path), "--samples", "8"]) == 0
    assert capsys.readouterr().out.count("trained on") == 8
    small_chats.write_lines(file, [{**record, "mood": "glad"}] * 32)
    with pytest.raises(DataError, match="All 32 records: the field 'mood'"):
        data.check_records(ByteTokenizer(), encodes=True)


@pytest.mark.parametrize("unknown", [None, "<unk>"])
@pytest.mark.parametrize("kind", ["messages", "fields"])
def test_characters_without_a_token_are_told(tmp_path: Any, kind: str, unknown: str | None) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    pieces = {piece: number for number, piece in enumerate(["<unk>", "<end>", *"abcdefghijklmnopqrstuvwxyz :"])}
    backend = Tokenizer(models.BPE(pieces, [], unk_token=unknown))
    named = {"eos_token": "<end>", **({} if unknown is None else {"unk_token": unknown})}
    made = PreTrainedTokenizerFast(tokenizer_object=backend, **named)
    made.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<end>{% endfor %}"
    made.save_pretrained(tmp_path)
    texts = "plain", "caf\u00e9 au lait"
    records = [
        say(("user", "a"), ("assistant", text)) if kind == "messages" else {"input": "a", "output": text}
        for text in texts
    ]
    report = report_of(AutoTokenizer(str(tmp_path), local_files_only=True), records)
    if unknown is None and kind == "fields":
        return  # text_to_ids reports no places
    [told] = report.places["with text that the tokenizer has no tokens for"]
    assert told.startswith("train[1]: ")
