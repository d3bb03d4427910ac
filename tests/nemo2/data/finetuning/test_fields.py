# SPDX-License-Identifier: Apache-2.0
"""Records of text fields in their usual forms, and files that hold them."""

import csv
import gzip
import json

import pytest

from nemo2.base.errors import ConfigError, DataError
from nemo2.data.documents import BadInput
from nemo2.data.finetuning.hf_dataset import HFDatasetDataModule
from nemo2.data.finetuning.module import FineTuningDataModule
from nemo2.data.finetuning.sample import Malformed
from nemo2.data.finetuning.settings import DatasetSettings
from nemo2.data.tokenizer import ByteTokenizer
from support.small_chats import StrictTokenizer, say, write_lines


def shown(record, **settings):
    sample = DatasetSettings.of(settings).template(ByteTokenizer()).encode(record)
    text = bytes(token for token in sample.ids if token < 256).decode()
    tokens = zip(sample.ids, sample.trained, strict=True)
    answer = bytes(token for token, trained in tokens if trained and token < 256).decode()
    return text.removesuffix(answer), answer


@pytest.mark.parametrize(
    ("record", "prompt", "answer"),
    [
        ({"input": "1 + 1 =", "output": "2"}, "1 + 1 =", " 2"),
        ({"instruction": "Add.", "input": "1, 2", "output": "3"}, "Add.\n1, 2", " 3"),
        ({"instruction": "Say hi.", "input": "", "output": "hi"}, "Say hi.", " hi"),
        ({"instruction": "Say hi.", "output": "hi"}, "Say hi.", " hi"),
        ({"instruction": "Add.", "input": None, "output": "3"}, "Add.", " 3"),
        (
            {"instruction": "Who?", "context": "Ada did.", "response": "Ada", "category": "open qa"},
            "Who?\nAda did.",
            " Ada",
        ),
        ({"instruction": "Add.", "input": "1 and 2", "response": "3"}, "Add.\n1 and 2", " 3"),
        ({"prompt": "2 + 2 =", "completion": " 4"}, "2 + 2 =", " 4"),
        ({"prompt": "Say hi.", "response": "hi"}, "Say hi.", " hi"),
        ({"question": "Who?", "answer": "Ada"}, "Who?", " Ada"),
        ({"query": "Who?", "response": "Ada"}, "Who?", " Ada"),
        ({"text": "All of it counts."}, "", "All of it counts."),
        # Alpaca's own files repeat the record as one text.
        (
            {"instruction": "Say.", "input": "", "output": "hi you", "text": "Below ... Say. ### hi you"},
            "Say.",
            " hi you",
        ),
    ],
)
def test_the_usual_forms_are_known_by_their_fields(record, prompt, answer):
    assert shown(record) == (prompt, answer)


def test_a_template_of_ones_own_decides():
    record = {"instruction": "x", "input": "y", "output": "z", "system": "Be kind."}
    assert shown(record, prompt_template="{system} {instruction}: {output}") == ("Be kind. x:", " z")
    assert shown({"a": "x", "b": "y"}, prompt_template="{a}{b}", label_key="b") == ("x", "y")
    with pytest.raises(ConfigError, match="label_key='b'"):
        DatasetSettings.of({"label_key": "b"}).template(ByteTokenizer())


@pytest.mark.parametrize("field, kept", [("instruction", "\nxxxx y"), ("input", "do it\n y"), (None, "do it\nxxxx")])
def test_the_field_that_is_truncated_does_not_decide_the_form(field, kept):
    record = {"instruction": "do it", "input": "xxxx", "output": "y"}
    encoder = DatasetSettings.of({"truncation_field": field, "add_eos": False}).template(ByteTokenizer())
    assert bytes(encoder.encode(record).ids) == b"do it\nxxxx y"
    assert bytes(encoder.truncate(record, encoder.encode(record), len(kept)).ids).decode() == kept
    with pytest.raises(ConfigError, match="'instructions' is no field of a prompt; did you mean 'instruction'"):
        DatasetSettings.of({"truncation_field": "instructions"}).template(ByteTokenizer())


UNSHOWN = "holds text that no sample would show.*'prompt_template'"


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"input": "x", "output": "y", "instruction_2": "in two words"}, f"'instruction_2' {UNSHOWN}"),
        ({"instruction": "x", "input": "y", "output": "z", "system": "Be kind."}, f"'system' {UNSHOWN}"),
        ({"instruction": "x", "output": "z", "history": [["what was", "said before"]]}, f"'history' {UNSHOWN}"),
        ({"prompt": "x", "completion": "y", "context": "a long text"}, f"'context' {UNSHOWN}"),
        ({"a": "x", "b": "y"}, r"'messages'.*'input'.*its fields are: a, b\..*'prompt_template'"),
        (say(("user", "x"), ("assistant", "y")), "Conversations are read by ChatDataModule"),
    ],
)
def test_records_of_no_form_and_text_that_no_sample_shows_are_malformed(record, why):
    with pytest.raises(Malformed, match=why):
        shown(record)


def test_a_prompt_that_is_too_long_is_cut_and_not_the_answer():
    encoder = DatasetSettings.of({}).template(ByteTokenizer())
    record = {"instruction": "do it", "input": "x" * 99, "output": "y"}
    cut = encoder.truncate(record, encoder.encode(record), 16)
    assert (
        len(cut.ids) <= 16 and bytes(cut.ids[:-1]).decode().startswith("do it\nx") and cut.ids[-2:] == [ord("y"), 256]
    )


RECORDS = [{"instruction": f"Say, {i}.", "input": "", "output": f'"{i}"\nlines'} for i in range(4)]


def written(folder, kind):
    name = {"lines as .json": "training.json", "BOM": "training.jsonl"}.get(kind, f"training.{kind}")
    file = folder / name
    if kind in ("csv", "tsv"):
        with open(file, "w", newline="", encoding="utf-8") as out:
            table = csv.DictWriter(out, list(RECORDS[0]), delimiter="," if kind == "csv" else "\t")
            table.writeheader()
            table.writerows(RECORDS)
    elif kind == "jsonl.gz":
        file.write_bytes(gzip.compress("\n".join(map(json.dumps, RECORDS)).encode()))
    elif kind == "json":
        file.write_text(json.dumps(RECORDS, indent=2))
    elif kind == "BOM":
        file.write_text("\ufeff" + json.dumps(RECORDS), encoding="utf-8")
    else:
        write_lines(file, RECORDS)
    return file


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "json", "csv", "tsv", "lines as .json", "BOM"])
@pytest.mark.parametrize("of", ["folder", "file", "module"])
def test_files_of_records_in_every_format(tmp_path, kind, of):
    file = written(tmp_path, kind)
    settings = {"tokenizer": ByteTokenizer(), "seq_length": 64}
    if of == "module":
        data = FineTuningDataModule(tmp_path, **settings)
    else:
        data = HFDatasetDataModule(str(file if of == "file" else tmp_path), **settings)
    report = data.samples("train").report
    assert (report.records, report.samples, report.places) == (4, 4, {})
    expected = sum(len(f"{one['instruction']} {one['output']}") + 1 for one in RECORDS)
    assert report.tokens == expected


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("training.csv", "input,output\na,b\nc\n", "training.csv:3: 1 cells in a table of 2 columns"),
        ("training.csv", 'input,output\n"a,b\n', "training.csv:2: not CSV"),
        ("training.csv", "input,input,output\na,b,c\n", "training.csv:1: two columns are named 'input'"),
        ("training.csv", "input;output\na;b\n", "its fields are: input;output"),
        ("training.json", '[{"input": "a", "output": "b"}, 7]', r"training.json\[1\]: a JSON int"),
        ("training.json", '[{"input": "a", "output": "b"}', "training.json:1: not JSON"),
        ("training.json", '{"data": [{"input": "a", "output": "b"}]}', "its fields are: data"),
    ],
)
def test_faults_of_such_files_are_named_with_their_place(tmp_path, name, text, why):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=why):
        FineTuningDataModule(tmp_path, tokenizer=ByteTokenizer(), seq_length=64).samples("train")


def test_two_files_of_one_split_are_refused(tmp_path):
    for kind in ("jsonl", "csv"):
        written(tmp_path, kind)
    with pytest.raises(DataError, match=r"training\.jsonl and training\.csv"):
        FineTuningDataModule(tmp_path, tokenizer=ByteTokenizer(), seq_length=64).samples("train")


def test_a_split_in_json_stands_beside_files_of_other_types(tmp_path):
    written(tmp_path, "jsonl")
    (tmp_path / "validation.json").write_text(json.dumps(RECORDS[:2]))
    (tmp_path / "dataset_info.json").write_text("{}")
    data = HFDatasetDataModule(str(tmp_path), tokenizer=ByteTokenizer(), seq_length=64)
    assert [data.samples(split).report.records for split in ("train", "validation")] == [4, 2]


def test_only_a_line_feed_ends_a_row_of_a_table(tmp_path):
    (tmp_path / "training.csv").write_text("text\none\u2028two\x0cthree\nfour\r\n", newline="")
    source = FineTuningDataModule(tmp_path, tokenizer=ByteTokenizer(), seq_length=64).source("train")
    rows = [(where.rpartition(":")[2], record["text"]) for where, record in source.records(BadInput())]
    assert rows == [("2", "one\u2028two\x0cthree"), ("3", "four")]


def test_descriptions_beside_the_data_are_not_data(tmp_path):
    write_lines(tmp_path / "train.jsonl", RECORDS)
    (tmp_path / "dataset_infos.json").write_text('{"default": {"features": {}}}')
    for _ in range(2):  # the second finds the first one's cache beside the data
        data = HFDatasetDataModule(str(tmp_path), tokenizer=ByteTokenizer(), seq_length=64)
        assert data.samples("train").report.records == 4


@pytest.mark.parametrize("policy", ["fail", "skip"])
def test_a_text_that_only_the_tokenizer_refuses_is_a_fault_of_its_record(tmp_path, policy):
    texts = ("x", "half \ud83d here", "poison", "z")
    write_lines(tmp_path / "training.jsonl", [{"input": text, "output": "y"} for text in texts])
    settings = {"dataset_kwargs": {"on_bad_line": policy}, "memmap_workers": 2}
    data = FineTuningDataModule(tmp_path, tokenizer=StrictTokenizer(), seq_length=64, **settings)
    if policy == "fail":
        with pytest.raises(DataError, match=r"training.jsonl:2: character 6 is \\ud83d, half of a surrogate pair"):
            data.samples("train")
        return
    report = data.samples("train").report
    assert report.samples == 2 and report.count("malformed") == 2
    assert "training.jsonl:3: the tokenizer fails: RuntimeError: panic" in report.places["malformed"][1]
