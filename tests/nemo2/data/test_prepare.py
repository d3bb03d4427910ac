# SPDX-License-Identifier: Apache-2.0
"""Text to token files, read back with Megatron-Core's own reader."""

import gzip
import hashlib
import json
import os
import resource
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from nemo2.base.errors import ConfigError, DataError, OutputExists
from nemo2.data.bpe import train_bpe
from nemo2.data.documents import find_files
from nemo2.data.prepare import _Writer, prepare_data
from nemo2.data.stdlib import prepare_demo_data, python_stdlib_corpus
from nemo2.data.token_files import read_sidecar
from nemo2.data.tokenizer import BPETokenizer, ByteTokenizer
from support.small_chats import StrictTokenizer

BYTES = ByteTokenizer()


def documents(prefix):
    """The texts in a pair of token files; each must end with the end-of-document id."""
    dataset = IndexedDataset(str(prefix))
    assert dataset.document_indices.tolist() == list(range(len(dataset) + 1))
    sequences = [dataset[i].tolist() for i in range(len(dataset))]
    assert all(sequence[-1] == BYTES.eod for sequence in sequences)
    return [BYTES.ids_to_text(sequence[:-1]) for sequence in sequences]


def jsonl(path, *lines):
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return path


def test_files_and_lines_become_documents_in_order(tmp_path):
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "in" / "b.txt").write_text("bee ☃")
    (tmp_path / "in" / "sub" / "a.py").write_text("x = 1\n")
    (tmp_path / "in" / ".hidden").write_text("no")
    lines = jsonl(tmp_path / "l.jsonl", {"text": "one"}, b"", {"text": "two\nlines", "id": 4})
    with gzip.open(tmp_path / "z.jsonl.gz", "wt") as file:
        file.write('{"text": "packed"}\n')
    prepared = prepare_data([lines, tmp_path / "in", tmp_path / "*.gz"], tmp_path / "out" / "data", BYTES)
    assert documents(tmp_path / "out" / "data") == ["one", "two\nlines", "bee ☃", "x = 1\n", "packed"]
    assert (prepared.documents, prepared.dtype, prepared.eod) == (5, "uint16", 256)
    assert prepared.tokens == sum(len(d.encode()) + 1 for d in documents(tmp_path / "out" / "data"))
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["data.bin", "data.idx", "data.json"]


def test_the_sidecar_describes_the_files_and_a_bar_changes_nothing(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    prepared = prepare_data(tmp_path / "a.txt", tmp_path / "d", BYTES)
    assert read_sidecar(tmp_path / "d") == prepared
    for suffix in ("bin", "idx"):
        assert hashlib.sha256((tmp_path / f"d.{suffix}").read_bytes()).hexdigest() == prepared.sha256[suffix]
    assert prepared.max_token_id == 256 and prepared.characters == 5
    assert prepare_data(tmp_path / "a.txt", tmp_path / "x", BYTES, progress=True).sha256 == prepared.sha256
    (tmp_path / "d.bin").write_bytes(b"other")
    assert read_sidecar(tmp_path / "d") is None  # it belongs to other files now


def test_a_large_vocabulary_gets_wider_ids(tmp_path):
    class Wide(ByteTokenizer):
        vocab_size = 100_000

    (tmp_path / "a.txt").write_text("hello")
    assert prepare_data(tmp_path / "a.txt", tmp_path / "d", Wide()).dtype == "int32"
    dataset = IndexedDataset(str(tmp_path / "d"))
    assert dataset[0].dtype == np.int32


BAD_LINES = [
    (b"{nope", r":2: not JSON"),
    (b'{"text": "\xff"}', r":2: not UTF-8"),
    (b'{"body": "x", "id": 1}', r":2: no text under the key 'text'; its keys are: body, id"),
    (b'{"text": 5}', r":2: no text under the key 'text'"),
    (b"[1]", r":2: a JSON list, not an object"),
]


@pytest.mark.parametrize(("line", "words"), BAD_LINES)
def test_a_bad_line_is_named_or_skipped_and_counted(tmp_path, line, words):
    lines = jsonl(tmp_path / "l.jsonl", {"text": "one"}, line, {"text": "two"})
    with pytest.raises(DataError, match=words):
        prepare_data(lines, tmp_path / "d", BYTES)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["l.jsonl"]  # nothing half-written stays behind
    prepared = prepare_data(lines, tmp_path / "d", BYTES, on_bad_line="skip")
    assert documents(tmp_path / "d") == ["one", "two"]
    assert prepared.skipped_documents == 1
    assert "l.jsonl:2" in prepared.skipped_examples[0]


def test_byte_order_marks_nul_and_long_lines_pass(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfbom\x00" + b"x" * 2_000_000)
    prepare_data(tmp_path / "a.txt", tmp_path / "d", BYTES)
    assert documents(tmp_path / "d") == ["bom\x00" + "x" * 2_000_000]


def test_other_keys_and_no_end_of_document(tmp_path):
    lines = jsonl(tmp_path / "l.jsonl", {"body": "one"})
    prepared = prepare_data(lines, tmp_path / "d", BYTES, text_key="body", append_eod=False)
    dataset = IndexedDataset(str(tmp_path / "d"))  # a name, because arrays do not keep the file mapped
    assert dataset[0].tolist() == list(b"one")
    assert prepared.eod is None


@pytest.mark.parametrize(
    ("text", "arguments", "error", "words"),
    [
        (b"", {}, DataError, "No text in 1 input file: 1 empty"),
        (b"fine\nfine\n\xff\xfe", {}, DataError, r"a\.txt:3: not UTF-8"),
        (b"x", {"source": "nowhere*"}, DataError, r"nowhere\*: this is no file"),
        (b"x", {"on_bad_line": "maybe"}, ConfigError, "on_bad_line='maybe'"),
        (b"x", {"output": "a.txt/d"}, ConfigError, r"a\.txt is a file, not a directory"),
        (b"x", {"output": "pipe"}, ConfigError, r"pipe\.idx is a device or pipe"),
    ],
)
def test_what_cannot_be_read_or_written_is_named(tmp_path, text, arguments, error, words):
    (tmp_path / "a.txt").write_bytes(text)
    os.mkfifo(tmp_path / "pipe.idx")
    options = {"source": "a.txt", "output": "d", **arguments}
    with pytest.raises(error, match=words):
        prepare_data(str(tmp_path / options.pop("source")), tmp_path / options.pop("output"), BYTES, **options)


def test_skipping_has_a_limit(tmp_path):
    lines = jsonl(tmp_path / "l.jsonl", {"text": "one"}, *[b"{"] * 5)
    with pytest.raises(DataError, match="More than max_bad_lines=4 .*l.jsonl:2"):
        prepare_data(lines, tmp_path / "d", BYTES, on_bad_line="skip", max_bad_lines=4)


def test_the_temporary_files_of_a_killed_writer_are_deleted_by_the_next_and_those_of_a_living_one_are_not(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    living, killed = (_Writer(tmp_path / "out", BYTES.vocab_size) for _ in range(2))
    killed._builder.data_file.close()
    killed._lock.close()  # as the kernel does when a process ends
    prepare_data(tmp_path / "a.txt", tmp_path / "out", BYTES)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert not any(Path(killed.temporary).name in name for name in names)
    assert Path(f"{living.temporary}.bin").exists()
    living.__exit__()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "out.bin", "out.idx", "out.json"]


def test_a_full_disk_leaves_nothing(tmp_path):
    jsonl(tmp_path / "a.jsonl", *[{"text": "text " * 20}] * 1000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(DataError, match="out.bin/.idx can't be written: .*File too large"):
            prepare_data(tmp_path / "a.jsonl", tmp_path / "out", BYTES)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_file_of_records_is_not_replaced_by_the_description(tmp_path):
    (tmp_path / "a.json").write_text('[{"text": "one"}]')
    with pytest.raises(OutputExists, match=r"a\.json exists"):
        prepare_data(tmp_path / "a.json", tmp_path / "a", BYTES)
    assert (tmp_path / "a.json").read_text() == '[{"text": "one"}]'


def test_an_interrupted_run_leaves_the_earlier_files(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("first")
    prepare_data(tmp_path / "a.txt", tmp_path / "d", BYTES)
    (tmp_path / "a.txt").write_text("second")
    monkeypatch.setattr("nemo2.data.prepare.sha256", lambda path: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(OutputExists, match="overwrite=True"):
        prepare_data(tmp_path / "a.txt", tmp_path / "d", BYTES)
    with pytest.raises(KeyboardInterrupt):
        prepare_data(tmp_path / "a.txt", tmp_path / "d", BYTES, overwrite=True)
    assert documents(tmp_path / "d") == ["first"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.txt", "d.bin", "d.idx", "d.json"]


def test_a_file_named_twice_is_read_once(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    assert find_files([tmp_path / "a.txt", tmp_path, str(tmp_path / "*.txt")]) == [tmp_path / "a.txt"]


def test_the_standard_library_corpus_is_its_own_sources():
    files = python_stdlib_corpus()
    root = Path(sysconfig.get_paths()["stdlib"])
    assert root / "argparse.py" in files
    assert files == sorted(files, key=lambda f: f.relative_to(root).as_posix())
    assert not [f for f in files if {"site-packages", "test", "tests"} & set(f.relative_to(root).parts)]
    thinned = python_stdlib_corpus(max_bytes=1_000_000)
    assert 800_000 < sum(f.stat().st_size for f in thinned) <= 1_000_000
    assert thinned == [f for f in files if f in set(thinned)]
    assert thinned[-1] in files[-len(files) // 5 :]  # from all of the library, not its beginning


def test_the_demo_data_is_made_once_and_found_again(tmp_path, monkeypatch):
    data = prepare_demo_data(tmp_path, vocab_size=512, max_bytes=400_000)
    tokenizer = BPETokenizer(data.tokenizer)
    assert tokenizer.vocab_size == 512
    train, validation = read_sidecar(data.train), read_sidecar(data.validation)
    assert train.tokens > 5 * validation.tokens > 0
    dataset = IndexedDataset(data.train)
    assert "import" in tokenizer.ids_to_text(np.concatenate([dataset[i] for i in range(5)]))
    monkeypatch.setattr("nemo2.data.bpe.train_bpe", None)  # it would fail if it were called again
    assert prepare_demo_data(tmp_path, vocab_size=512, max_bytes=400_000) == data


@pytest.mark.quick
def test_two_ranks_preparing_at_once_get_the_same_finished_files(tmp_path, run_on_ranks):
    small = {"vocab_size": 512, "max_bytes": 200_000}
    first, second = run_on_ranks(prepare_demo_data, 2, tmp_path, init_process_group=False, **small)
    assert first == second
    assert read_sidecar(first.train).documents > 0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.JSONL", '{"text": "one"}\n{"text": "two"}\n'),
        ("a.json", '[{"text": "one"},\n {"text": "two"}]'),
        ("a.json", '{"text": "one"}\n{"text": "two"}\n'),
        ("a.csv", 'id,text\n1,one\n2,"two"\n'),
        ("a.TSV", "text\tid\none\t1\ntwo\t2\n"),
    ],
)
def test_records_are_documents_whatever_their_file(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    prepared = prepare_data(tmp_path / name, tmp_path / "out", BYTES)
    assert (prepared.documents, prepared.characters) == (2, 6)


@pytest.mark.parametrize("name", ["a.json", "a.csv", "a.JSONL", "a.parquet"])
def test_records_without_text_are_not_tokenized_as_syntax(tmp_path, name):
    text = {"a.csv": "question\nwhat?\n"}.get(name, '{"question": "what?"}\n')
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=r"a\..*(its keys are: question. Name one with text_key|which is not text)"):
        prepare_data(tmp_path / name, tmp_path / "out", BYTES)


@pytest.mark.parametrize("policy", ["fail", "skip"])
@pytest.mark.parametrize("many", [False, True], ids=["one by one", "in batches"])
def test_a_document_that_the_tokenizer_refuses_is_named_or_skipped(tmp_path, policy, many):
    class Batched(StrictTokenizer):
        def texts_to_ids(self, texts):
            return [self.text_to_ids(text) for text in texts]

    lines = jsonl(tmp_path / "a.jsonl", *[{"text": text} for text in ("one", "half \ud83d", "poison", "two")])
    tokenizer = Batched() if many else StrictTokenizer()
    if policy == "fail":
        with pytest.raises(DataError, match=r"a.jsonl:2: character 6 is \\ud83d, half of a surrogate pair"):
            prepare_data(lines, tmp_path / "out", tokenizer)
        return
    prepared = prepare_data(lines, tmp_path / "out", tokenizer, on_bad_line="skip")
    assert (prepared.documents, prepared.skipped_documents) == (2, 2)
    assert "a.jsonl:3: the tokenizer fails: RuntimeError: panic" in prepared.skipped_examples[1]


def test_special_tokens_that_a_text_spells_are_counted(tmp_path):
    lines = jsonl(tmp_path / "a.jsonl", *[{"text": text} for text in ("one", "<|endoftext|> two", "three")])
    tokenizer = train_bpe(iter(["one two three"]), 300, tmp_path / "tokenizer.json")
    prepared = prepare_data(lines, tmp_path / "out", tokenizer)
    assert (prepared.documents, prepared.documents_with_special_tokens) == (3, 1)


def test_text_without_tokens_is_counted(tmp_path):
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE({"<unk>": 0, "a": 1, "b": 2}, [], unk_token="<unk>")).save(str(tmp_path / "tokenizer.json"))
    lines, tokenizer = (
        jsonl(tmp_path / "a.jsonl", {"text": "ab"}, {"text": "a\u00e9"}),
        BPETokenizer(tmp_path / "tokenizer.json"),
    )
    prepared = prepare_data(lines, tmp_path / "out", tokenizer, append_eod=False)
    assert (prepared.documents, prepared.documents_with_unknown_text) == (2, 1)
