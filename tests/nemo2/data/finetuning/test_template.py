# SPDX-License-Identifier: Apache-2.0
"""Prompt templates: what is asked, what is answered, and which field gives way."""

from dataclasses import replace
from pathlib import Path

import pytest

from nemo2.base.errors import ConfigError
from nemo2.config import notices
from nemo2.data.finetuning.sample import Empty, Malformed
from nemo2.data.finetuning.settings import DatasetSettings
from nemo2.data.finetuning.template import TemplateEncoder
from nemo2.data.sentencepiece import SentencePieceTokenizer
from nemo2.data.tokenizer import ByteTokenizer, NullTokenizer
from support import small_chats

BYTES = ByteTokenizer()
SENTENCEPIECE = Path(__file__).parent.parent / "sentencepiece"


def text_of(sample, trained):
    return bytes(i for i, t in zip(sample.ids, sample.trained, strict=True) if t == trained and i < 256).decode()


def encode(record, **settings):
    return TemplateEncoder(BYTES, **settings).encode(record)


def truncated(record, max_tokens, **settings):
    return TemplateEncoder(BYTES, **settings).truncate(record, encode(record, **settings), max_tokens)


def test_the_answer_and_its_end_are_trained_on():
    sample = encode({"input": "1 + 1 =", "output": "2"})
    assert (text_of(sample, False), text_of(sample, True)) == ("1 + 1 =", " 2")
    assert sample.ids[-1] == BYTES.eos_id and sample.trained[-1]
    assert sample.num_trained == 3
    assert (
        replace(sample, trained=[True] * len(sample.ids)).num_trained == len(sample.ids) - 1
    )  # nothing predicts the first


def test_a_tokenizer_of_ones_own_is_known_by_its_ids():
    class Shifted:
        vocab_size, eos_id, bos_id, pad_id = 400, 0, None, 0

        def __init__(self, by):
            self.by = by

        def text_to_ids(self, text):
            return [ord(character) + self.by for character in text]

    of = {by: TemplateEncoder(Shifted(by)).identity["tokenizer"] for by in (3, 4)}
    assert of[3] == TemplateEncoder(Shifted(3)).identity["tokenizer"]
    assert of[3] != of[4]


def test_any_fields_and_text_behind_the_answer():
    template = "Context: {context}\nQuestion: {question}\nAnswer:  {label}\n###"
    record = {"context": "Rome", "question": "Where?", "label": "In Rome."}
    sample = encode(record, prompt_template=template, label_key="label", add_eos=False)
    assert text_of(sample, False) == "Context: Rome\nQuestion: Where?\nAnswer:"
    assert text_of(sample, True) == "  In Rome.\n###"


def test_prompt_and_answer_have_the_ids_that_they_have_by_themselves(tmp_path):
    tokenizer = small_chats.make_tokenizer(tmp_path)
    sample = TemplateEncoder(tokenizer).encode({"input": "What does the function", "output": "return"})
    assert sample.ids == [
        *tokenizer.text_to_ids("What does the function"),
        *tokenizer.text_to_ids(" return"),
        tokenizer.eos_id,
    ]


@pytest.mark.parametrize(
    ("template", "parts"), [("{input} {output}", True), ("Q: {input}\nA: {output}", True), ("{input}{output}", False)]
)
def test_a_tokenizer_that_begins_texts_with_a_blank_puts_none_before_an_answer(template, parts):
    tokenizer = SentencePieceTokenizer(SENTENCEPIECE / "bpe.model")
    record = {"input": "return the val", "output": "ue of it"}
    sample = TemplateEncoder(tokenizer, prompt_template=template, add_eos=False).encode(record)
    assert (sample.ids == tokenizer.text_to_ids(template.format(**record))) == parts
    prompt = [token for token, trained in zip(sample.ids, sample.trained, strict=True) if not trained]
    assert prompt == tokenizer.text_to_ids(template.format(input=record["input"], output="").rstrip())


def test_the_prompt_too_and_numbers():
    assert all(encode({"input": "a", "output": "b"}, answer_only_loss=False).trained)
    numbers = TemplateEncoder(NullTokenizer(10), prompt_template="{input} {output}")
    assert numbers.encode({"input": "1 2", "output": "3"}).ids == [1, 2, 3, 9]


@pytest.mark.parametrize("method, kept", [("right", "abcd"), ("left", "ghij")])
def test_the_field_that_may_be_cut_gives_way_and_the_answer_stays(method, kept):
    record = {"question": "abcdefghij", "input": "Q:", "output": "yes"}
    settings = {"truncation_field": "question", "truncation_method": method}
    settings["prompt_template"] = "{input} {question} {output}"
    whole = encode(record, **settings)
    cut = truncated(record, len(whole.ids) - 6, **settings)
    assert cut.truncated and text_of(cut, False) == f"Q: {kept}" and text_of(cut, True) == " yes"
    assert cut.num_trained == whole.num_trained


def test_the_end_is_cut_where_the_field_is_not_enough():
    cut = truncated({"input": "abc", "output": "a long answer"}, 5)
    assert text_of(cut, True) == " a lo" and len(cut.ids) == 5
    assert truncated({"input": "abc", "output": "yes"}, 4, truncation_field=None).ids == list(b"abc ")


def test_a_template_without_the_default_field_cuts_the_last_of_its_prompt():
    record, settings = (
        {"system": "S:", "ask": "abcdefghij", "output": "yes"},
        {"prompt_template": "{system} {ask} {output}"},
    )
    whole = encode(record, **settings)
    cut = truncated(record, len(whole.ids) - 6, **settings)
    assert text_of(cut, False) == "S: abcd" and cut.num_trained == whole.num_trained


RECORD = {"input": "a", "output": "b"}


@pytest.mark.parametrize(
    "record, settings, error, why",
    [
        ({"input": "a"}, {}, Malformed, "no field 'output'; its fields are: input"),
        ({"input": 1, "output": "b"}, {}, Malformed, "the field 'input' is a int, not text"),
        ("text", {}, Malformed, "a str, not a record"),
        ({"input": "a", "output": " "}, {}, Empty, "the answer, 'output', is empty"),
        (RECORD, {"prompt_template": "{input}"}, ConfigError, r"does not contain \{output\}"),
        (RECORD, {"prompt_template": "{output} {output}"}, ConfigError, "contains a field twice"),
        (RECORD, {"prompt_template": "{output} {"}, ConfigError, "prompt_template="),
        (RECORD, {"truncation_field": "inputs"}, ConfigError, "truncation_field='inputs'.*did you mean 'input'"),
        (RECORD, {"truncation_method": "middle"}, ConfigError, "must be 'left' or 'right'"),
        (RECORD, {"add_bos": True}, ConfigError, r"add_bos=True, and ByteTokenizer\(\) has no bos token"),
    ],
)
def test_records_and_templates_that_cannot_be_meant(record, settings, error, why):
    with pytest.raises(error, match=why):
        encode(record, **settings)


@pytest.mark.parametrize("template", ["{input:.3} {output}", "{input!r} {output}", "{input} {output:>9}", ""])
def test_a_template_that_would_not_be_followed_is_refused(template):
    with pytest.raises(ConfigError, match="asks for a form of the field" if template else "the text is empty"):
        DatasetSettings.of({"prompt_template": template}).template(BYTES)


def test_an_answer_is_truncated_on_the_left_and_keeps_its_end():
    record = {"input": "ask", "output": "one two three"}
    settings = {"truncation_field": "output", "truncation_method": "left"}
    sample = truncated(record, 10, **settings)
    assert (text_of(sample, False), text_of(sample, True)) == ("ask", " three")
    assert sample.ids[-1] == BYTES.eos_id and sample.truncated
    assert text_of(truncated(record, 10, truncation_field="output"), True) == " one tw"


def test_a_side_without_a_field_to_truncate_is_refused():
    with pytest.raises(ConfigError, match="truncation_method='left' with truncation_field=None"):
        DatasetSettings.of({"truncation_field": None, "truncation_method": "left"})


def test_a_backslash_before_an_n_is_told_and_kept(monkeypatch, caplog):
    monkeypatch.setattr(notices, "_announced", set())
    settings = DatasetSettings.of({"prompt_template": r"{input}\n{output}"})
    assert r"the two characters \n" in caplog.text
    assert text_of(settings.template(BYTES).encode({"input": "a", "output": "b"}), True) == "b"
    caplog.clear()
    DatasetSettings.of({"prompt_template": "{input}\n{output}"})
    assert not caplog.text
