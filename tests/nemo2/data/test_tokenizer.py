# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: text to ids and back, special ids, and words for what is missing."""

import json
import os
import pickle
import sys
from types import ModuleType, SimpleNamespace

import pytest

from nemo2.base.errors import ConfigError, DataError
from nemo2.config import notices
from nemo2.data.bpe import train_bpe
from nemo2.data.tokenizer import (
    AutoTokenizer,
    BPETokenizer,
    ByteTokenizer,
    GPT2BPETokenizer,
    NullTokenizer,
    Tokenizer,
    identity_of,
)

TEXT = "def total(values):\n    return sum(values)  # naïve – 数 🙂\n"


TRAINED_ON = [TEXT * 30, "while True:\n    total += 1\n" * 20]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    return train_bpe(iter(TRAINED_ON), 300, path, ("<|endoftext|>", "<pad>"))


@pytest.mark.parametrize("text", [TEXT, "", " ", "\n\n\tx", "\x00\x01", "﻿bom"])
def test_text_comes_back_from_its_ids(bpe, text):
    for tokenizer in (bpe, ByteTokenizer()):
        ids = tokenizer.text_to_ids(text)
        assert tokenizer.ids_to_text(ids) == tokenizer.detokenize(tokenizer.tokenize(text)) == text
        assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_a_trained_vocabulary_has_the_size_asked_for_and_its_special_tokens_first(bpe):
    assert bpe.vocab_size == 300
    assert (bpe.eod, bpe.eos_id) == (0, 0)
    assert BPETokenizer(bpe.path, pad_token="<pad>").pad_id == 1
    assert len(bpe.text_to_ids(TEXT)) < len(ByteTokenizer().text_to_ids(TEXT))


def test_training_is_deterministic(bpe, tmp_path):
    again = train_bpe(iter(TRAINED_ON), 300, tmp_path / "t.json", ("<|endoftext|>", "<pad>"))
    assert again.sha256 == bpe.sha256
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


def test_special_tokens_written_in_text_are_recognised_and_left_out_of_text(bpe):
    assert bpe.text_to_ids("a<|endoftext|>")[-1] == bpe.eod
    assert bpe.ids_to_text([*bpe.text_to_ids("a"), bpe.eod]) == "a"


def test_identity_is_the_contents_and_not_the_path(bpe, tmp_path):
    copy = tmp_path / "tokenizer.json"
    copy.write_bytes((tmp_path.parent / bpe.path).read_bytes())
    assert BPETokenizer(tmp_path).unique_identifiers == bpe.unique_identifiers
    assert BPETokenizer(copy, eos_token="<pad>").unique_identifiers != bpe.unique_identifiers
    # Stored samples may hold the token that begins a text.
    assert identity_of(BPETokenizer(copy)) == identity_of(bpe) != identity_of(BPETokenizer(copy, bos_token="<pad>"))
    json.dumps(bpe.unique_identifiers)  # Megatron-Core writes it into the description of an index


def test_a_loaded_tokenizer_can_be_sent_to_a_worker_and_batches_have_the_ids_of_single_texts(bpe):
    single = [bpe.text_to_ids(text) for text in (TEXT, "", "x")]
    assert pickle.loads(pickle.dumps(bpe)).texts_to_ids([TEXT, "", "x"]) == bpe.texts_to_ids([TEXT, "", "x"]) == single


def test_a_file_that_was_saved_while_texts_were_cut_and_filled_up_does_neither(bpe, tmp_path):
    from tokenizers import Tokenizer as Tokenizers

    saved = Tokenizers.from_file(bpe.path)
    saved.enable_truncation(2)
    saved.enable_padding(length=8)
    saved.save(str(tmp_path / "tokenizer.json"))
    tokenizer = BPETokenizer(tmp_path)
    assert tokenizer.texts_to_ids(["a longer text", "a"]) == bpe.texts_to_ids(["a longer text", "a"])
    assert tokenizer.text_to_ids("a longer text") == bpe.text_to_ids("a longer text")


def test_files_are_read_at_first_use_and_what_they_lack_is_an_error(bpe, tmp_path):
    (tmp_path / "bad.json").write_text("{}")
    letters = train_bpe(iter(["abc"]), 300, tmp_path / "t.json", ())
    assert letters.eos_id is None and letters.pad == -1
    for tokenizer, member, words in (
        (BPETokenizer(tmp_path / "nowhere.json"), "vocab_size", r"nowhere\.json does not exist.*--train-bpe"),
        (BPETokenizer(tmp_path / "bad.json"), "vocab_size", "not a tokenizer of the `tokenizers` package"),
        (BPETokenizer(bpe.path, bos_token="<s>"), "bos_id", "bos_token='<s>' is not in the vocabulary"),
        (letters, "eod", "has no end-of-document token"),
    ):
        with pytest.raises(DataError, match=words):
            getattr(tokenizer, member)


def test_gpt2_files_make_gpt2s_tokenizer(tmp_path):
    letters = {token: i for i, token in enumerate(["l", "o", "w", "Ġ", "lo", "low", "Ġlow", "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(letters))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nl o\nlo w\nĠ low\n")
    tokenizer = GPT2BPETokenizer(tmp_path / "vocab.json", tmp_path / "merges.txt")
    assert tokenizer.text_to_ids("low low") == [5, 6]
    assert tokenizer.ids_to_text([5, 6]) == "low low"
    assert (tokenizer.vocab_size, tokenizer.eod) == (8, 7)
    with pytest.raises(DataError, match="not GPT-2's vocab.json and merges.txt"):
        _ = GPT2BPETokenizer(tmp_path / "vocab.json", tmp_path / "no.txt").vocab_size


def test_numbers_are_the_text_of_the_null_tokenizer():
    tokenizer = NullTokenizer(10)
    assert tokenizer.text_to_ids("3 0 8") == [3, 0, 8]
    assert tokenizer.ids_to_text([3, 0, 9]) == "3 0"
    assert (tokenizer.vocab_size, tokenizer.eod) == (10, 9)
    with pytest.raises(DataError, match="outside the vocabulary of 10"):
        tokenizer.text_to_ids("10")
    with pytest.raises(DataError, match=r"reads numbers only, and '2 \+ 2' is text.*load_artifacts=False"):
        tokenizer.text_to_ids("2 + 2")
    with pytest.raises(ConfigError, match="vocab_size=1"):
        NullTokenizer(1)


def hugging_face(monkeypatch, from_pretrained):
    module = ModuleType("transformers")
    module.AutoTokenizer = SimpleNamespace(from_pretrained=from_pretrained)
    monkeypatch.setitem(sys.modules, "transformers", module)


def test_hugging_face_tokenizers_are_asked_as_configured(monkeypatch):
    class Fake:
        eos_token_id, bos_token_id, pad_token_id, unk_token_id = 1, 0, None, None

        def __len__(self):
            return 4

        def encode(self, text, add_special_tokens):
            assert not add_special_tokens
            return [int(c) for c in text]

        def decode(self, ids, skip_special_tokens):
            assert skip_special_tokens
            return "".join(map(str, ids))

        def get_vocab(self):
            return {"<s>": 0, "</s>": 1, "2": 2, "3": 3}

    asked = {}

    def from_pretrained(name, **kwargs):
        asked.update(kwargs, name=name)
        return Fake()

    hugging_face(monkeypatch, from_pretrained)
    tokenizer = AutoTokenizer("some/model", revision="abc", pad_token="<pad>")
    assert not asked  # nothing is loaded yet
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.bos_id, tokenizer.pad) == (4, 1, 0, -1)
    assert tokenizer.ids_to_text(tokenizer.text_to_ids("23")) == "23"
    assert asked == {
        "name": "some/model", "use_fast": True, "trust_remote_code": False, "revision": "abc",
        "local_files_only": False, "pad_token": "<pad>",
    }  # fmt: skip
    json.dumps(tokenizer.unique_identifiers)


def test_a_hugging_face_tokenizer_that_is_not_there_says_what_to_do(monkeypatch):
    def refuse(name, **kwargs):
        raise OSError("some/model is not a local folder")

    hugging_face(monkeypatch, refuse)
    with pytest.raises(DataError, match=r"'some/model' could not be loaded here or on .* give its directory"):
        _ = AutoTokenizer("some/model").vocab_size
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install 'transformers"):
        _ = AutoTokenizer("some/model").vocab_size


@pytest.mark.parametrize(
    ("texts", "size", "output", "error", "words"),
    [
        (["a"], 256, "t.json", ConfigError, "must be at least 257"),
        (["", ""], 300, "t.json", DataError, "no text to train a tokenizer on"),
        (["one two"], 300, "pipe", ConfigError, "pipe is a device or pipe"),
    ],
)
def test_a_training_that_cannot_be_is_refused_and_writes_nothing(tmp_path, texts, size, output, error, words):
    os.mkfifo(tmp_path / "pipe")
    unread = iter(texts)
    with pytest.raises(error, match=words):
        train_bpe(unread, size, tmp_path / output)
    assert next(unread, None) == (None if error is DataError else texts[0]), "refused before the text is read"
    assert (tmp_path / "pipe").is_fifo() and len(list(tmp_path.iterdir())) == 1


def test_training_on_files_reads_them_as_preparing_does(tmp_path):
    lines = tmp_path / "l.jsonl"
    lines.write_bytes(b'{"body": "one two"}\n{bad\n{"body": "three"}\n')
    with pytest.raises(DataError, match="l.jsonl:2: not JSON"):
        train_bpe(lines, 300, tmp_path / "t.json", text_key="body")
    from_file = train_bpe(lines, 300, tmp_path / "t.json", text_key="body", on_bad_line="skip")
    from_texts = train_bpe(iter(["one two", "three"]), 300, tmp_path / "u.json")
    assert from_file.sha256 == from_texts.sha256


def test_a_tokenizer_of_ones_own_needs_four_members_only():
    class Letters(Tokenizer):
        vocab_size = 27
        unique_identifiers = {"class": "Letters"}

        def text_to_ids(self, text):
            return [ord(c) - 96 for c in text]

        def ids_to_text(self, ids):
            return "".join(chr(i + 96) for i in ids)

    assert Letters().detokenize(Letters().tokenize("abc")) == "abc"
    assert Letters().pad == -1


def test_a_vocabulary_with_holes_is_as_large_as_its_largest_id(tmp_path):
    from tokenizers import Tokenizer as Tokenizers
    from tokenizers import models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizers(models.WordLevel({"x": 0, "y": 1, "[UNK]": 9, "</s>": 17}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "tokenizer.json"))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(str(tmp_path / "hf"))
    for tokenizer in (BPETokenizer(tmp_path / "tokenizer.json"), AutoTokenizer(str(tmp_path / "hf"))):
        assert tokenizer.text_to_ids("x z y") == [0, 9, 1] and tokenizer.eos_id == 17
        assert tokenizer.vocab_size == 18


def test_a_token_that_a_released_tokenizer_lacks_is_told(tmp_path, monkeypatch, caplog):
    from support.small_chats import make_tokenizer

    make_tokenizer(tmp_path / "released")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(notices, "_announced", set())
    tokenizer = AutoTokenizer("~/released")
    for token, told in ((tokenizer.tokenizer.eos_token, False), ("<new>", True)):
        assert (AutoTokenizer("~/released", eos_token=token).vocab_size > tokenizer.vocab_size) == told
        assert ("eos_token='<new>' is not in its vocabulary" in caplog.text) == told


@pytest.mark.parametrize(("kind", "token"), [(BPETokenizer, 2), (AutoTokenizer, ""), (AutoTokenizer, 7)])
def test_special_tokens_are_texts(kind, token):
    with pytest.raises(ConfigError, match="must be the text of a token"):
        kind("folder", eos_token=token)


def test_a_revision_of_a_folder_is_told(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(notices, "_announced", set())
    AutoTokenizer(str(tmp_path), revision="v2")
    assert "revision='v2' has no effect" in caplog.text
    caplog.clear()
    AutoTokenizer("organisation/name", revision="v2")
    assert not caplog.text
