# SPDX-License-Identifier: Apache-2.0
"""Broken token files: each is refused before Megatron-Core sees it, with what is wrong and where."""

import struct

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from nemo2.base.errors import DataError
from nemo2.data import indexed
from nemo2.data.indexed import check_token_ids, open_token_file

LENGTHS = [5, 1, 8, 3]
COUNTS_AT, LENGTHS_AT = 18, 34
OFFSETS_AT = LENGTHS_AT + 4 * len(LENGTHS)
ENDS_AT = OFFSETS_AT + 8 * len(LENGTHS)


def write(prefix, documents, dtype=np.uint16):
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        builder.add_document(np.asarray(document), [len(document)])
    builder.finalize(f"{prefix}.idx")
    return prefix


@pytest.fixture
def prefix(tmp_path):
    return write(tmp_path / "corpus", [range(i, i + n) for i, n in enumerate(LENGTHS)])


def patch(prefix, at, data, suffix=".idx"):
    path = prefix.with_suffix(suffix)
    contents = bytearray(path.read_bytes())
    contents[at : at + len(data)] = data
    path.write_bytes(contents)


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_a_good_file_opens_with_either_suffix(prefix, suffix):
    file = open_token_file(f"{prefix}{suffix}")
    assert file.lengths.tolist() == LENGTHS
    assert (file.tokens, file.dtype) == (17, np.uint16)
    reader = IndexedDataset(str(prefix))
    assert file.lengths.tolist() == reader.sequence_lengths.tolist()


def test_tokens_of_a_part_are_counted_over_the_documents_that_megatron_takes(prefix):
    file = open_token_file(prefix)
    assert file.tokens_between(0.0, 0.5) == 5 + 1
    assert file.tokens_between(0.5, 1.0) == 8 + 3
    assert file.tokens_between(0.9, 0.95) == 0


CORRUPT = [
    (0, b"X", "does not start like an index"),
    (9, struct.pack("<Q", 2), "format version 2"),
    (17, b"\x00", "its data type has code 0"),
    (17, b"\x07", "its data type has code 7"),
    (COUNTS_AT, struct.pack("<Q", 10**15), "announces 1000000000000000 sequences"),
    (COUNTS_AT + 8, struct.pack("<Q", 3), "3 document ends, which does not fit"),
    (LENGTHS_AT + 8, struct.pack("<i", -1), "sequence 2 is said to have -1 tokens from byte 12"),
    (LENGTHS_AT + 8, struct.pack("<i", 10**9), "sequence 2 is said to have 1000000000 tokens"),
    (OFFSETS_AT + 24, struct.pack("<q", -2), "sequence 3 is said to have 3 tokens from byte -2 of a .bin file of 34"),
    (OFFSETS_AT + 24, struct.pack("<q", 2**63 - 1), "sequence 3 is said to have 3 tokens from byte 92233720368547758"),
    (OFFSETS_AT + 24, struct.pack("<q", 30), "sequence 3 is said to have 3 tokens from byte 30"),
    (ENDS_AT, struct.pack("<q", 1), "document ends do not lead from 0"),
    (ENDS_AT + 8, struct.pack("<q", 9), "document ends do not lead from 0"),
    (ENDS_AT + 32, struct.pack("<q", 3), "document ends do not lead from 0 to the 4 sequences"),
]


@pytest.mark.parametrize(("at", "data", "words"), CORRUPT)
def test_a_corrupt_index_is_refused_with_the_place(prefix, at, data, words):
    patch(prefix, at, data)
    with pytest.raises(DataError, match=f"corpus.idx is corrupt: .*{words}"):
        open_token_file(prefix)


@pytest.mark.parametrize(
    ("suffix", "size", "words"),
    [
        *[(".idx", size, "corpus.idx is corrupt") for size in (0, 5, 33, 40, ENDS_AT + 39)],
        (".bin", -1, "sequence 3 is said to have 3 tokens from byte 28 of a .bin file of 33 bytes"),
    ],
)
def test_a_truncated_file_is_refused(prefix, suffix, size, words):
    path = prefix.with_suffix(suffix)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DataError, match=words):
        open_token_file(prefix)


def test_faults_far_into_a_large_index_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(indexed, "_ROWS_AT_ONCE", 8)
    prefix = write(tmp_path / "corpus", [[1]] * 100)
    patch(prefix, 34 + 4 * 77, struct.pack("<i", 1000))
    with pytest.raises(DataError, match="sequence 77 is said to have 1000 tokens"):
        open_token_file(prefix)


def test_an_index_without_documents_is_refused(tmp_path):
    with pytest.raises(DataError, match="lists no documents"):
        open_token_file(write(tmp_path / "empty", []))


def test_missing_files_are_named_with_what_is_there(prefix):
    with pytest.raises(DataError, match=r"No dataset at .*/corpu: neither .*corpu\.bin nor .* there are corpus\."):
        open_token_file(prefix.with_name("corpu"))
    with pytest.raises(DataError, match="folder .*nowhere does not exist"):
        open_token_file(prefix.parent / "nowhere" / "x")
    prefix.with_suffix(".bin").unlink()
    with pytest.raises(DataError, match=r"corpus\.bin is missing, but the other file of the dataset exists"):
        open_token_file(prefix)


def test_the_fingerprint_follows_the_contents_and_not_the_place(prefix, tmp_path):
    before = open_token_file(prefix).fingerprint
    (tmp_path / "copy").mkdir()
    same = write(tmp_path / "copy" / "other", [range(i, i + n) for i, n in enumerate(LENGTHS)])
    assert open_token_file(same).fingerprint == before
    write(prefix, [range(n) for n in reversed(LENGTHS)])  # as many tokens and documents, cut otherwise
    assert open_token_file(prefix).fingerprint != before


def test_ids_outside_the_vocabulary_are_refused(prefix, tmp_path):
    check_token_ids(open_token_file(prefix), vocab_size=10)
    with pytest.raises(DataError, match="contains token id 9, but the tokenizer has 9 ids"):
        check_token_ids(open_token_file(prefix), vocab_size=9)
    with pytest.raises(DataError, match="contains token id -1"):
        check_token_ids(open_token_file(write(tmp_path / "negative", [[3, -1, 2]], np.int32)), vocab_size=10)


def test_large_files_are_scanned_in_spread_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(indexed, "_SCANNED_AT_ONCE", 40)
    monkeypatch.setattr(indexed, "_SCANNED_BYTES", 400)
    file = open_token_file(write(tmp_path / "corpus", [[1] * 990 + [50] * 10], np.int32))
    with pytest.raises(DataError, match="token id 50"):  # the last part is among the ten looked at
        check_token_ids(file, vocab_size=50)
