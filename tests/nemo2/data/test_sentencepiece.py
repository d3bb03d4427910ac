# SPDX-License-Identifier: Apache-2.0
"""SentencePiece's models, against ids and texts that the package sentencepiece 0.2.3 gave (``sentencepiece/expected.json``).

``unigram.model`` has a normalisation rule, removes extra spaces and has two symbols of its own; ``bpe.model`` falls back to
bytes, keeps spaces, has a padding id and the same symbols. Both were trained on the standard library.
"""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from nemo2.base.errors import ConfigError, DataError
from nemo2.data import SentencePieceTokenizer, get_nmt_tokenizer, get_tokenizer
from nemo2.data.tokenizer_files import files_of

FOLDER = Path(__file__).parent / "sentencepiece"
EXPECTED: dict[str, Any] = json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", EXPECTED)
def test_ids_and_texts_are_those_of_sentencepiece(kind: str) -> None:
    expected, tokenizer = EXPECTED[kind], SentencePieceTokenizer(FOLDER / f"{kind}.model")
    assert tokenizer.vocab_size == expected["vocab_size"]
    ids = [tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.unk_id]
    assert [-1 if one is None else one for one in ids] == expected["bos_eos_pad_unk"]
    for text, own, back, _ in expected["samples"]:
        assert tokenizer.text_to_ids(text) == own, text
        assert tokenizer.ids_to_text(own) == back, text
    for own, back in expected["ids_to_text"]:
        assert tokenizer.ids_to_text(own) == back
    assert len(expected["samples"]) > 15


def test_a_piece_is_told_by_its_own_name() -> None:
    tokenizer = SentencePieceTokenizer(FOLDER / "bpe.model")
    text, own, _, pieces = next(one for one in EXPECTED["bpe"]["samples"] if "<sep>after" in one[0])
    assert tokenizer.text_to_tokens(text) == pieces and len(own) == len(pieces)


def test_workers_and_indexes_know_the_file_by_its_contents() -> None:
    tokenizer = SentencePieceTokenizer(FOLDER / "bpe.model")
    ids = tokenizer.text_to_ids("def f(x)")
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.text_to_ids("def f(x)") == ids and again.unique_identifiers == tokenizer.unique_identifiers
    assert tokenizer.eod == 2 and tokenizer.unique_identifiers["sha256"]
    assert files_of(tokenizer) == {"bpe.model": FOLDER / "bpe.model"}, "it travels with a checkpoint"


WHOLE = (FOLDER / "bpe.model").read_bytes()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "can't be read"),
        *[
            (content, "is not a SentencePiece model")
            for content in (b"", b"not a model, but a text", WHOLE[:-7], WHOLE[:1000])
        ],
        (b"IQ== 0\nIg== 1\nIw== 2\n", "tiktoken"),
    ],
)
def test_what_is_no_model_is_refused(tmp_path: Path, content: bytes | None, words: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(DataError, match=words):
        _ = SentencePieceTokenizer(tmp_path / "tokenizer.model").vocab_size


@pytest.mark.parametrize(
    "made",
    [
        get_nmt_tokenizer("sentencepiece", tokenizer_model=str(FOLDER / "bpe.model")),
        get_nmt_tokenizer("megatron", "GPTSentencePieceTokenizer", str(FOLDER / "bpe.model")),
        get_tokenizer("sentencepiece", str(FOLDER / "bpe.model")),
    ],
    ids=["library", "megatron", "get_tokenizer"],
)
def test_nemos_ways_of_naming_one(made: Any) -> None:
    assert isinstance(made, SentencePieceTokenizer) and made.vocab_size == EXPECTED["bpe"]["vocab_size"]


def test_get_tokenizer_takes_names_and_the_chat_template() -> None:
    made = get_tokenizer("a/b", special_tokens={"eos_token": "</s>"}, chat_template="{{ messages }}")
    assert (made.pretrained_model_name, made.eos_token, made.chat_template) == ("a/b", "</s>", "{{ messages }}")  # type: ignore[attr-defined]
    assert type(get_tokenizer("a/b", vocab_file="v", merges_file="m")).__name__ == "GPT2BPETokenizer"
    made = get_tokenizer("a/b", "tokenizer.json", chat_template="{{ messages }}")
    assert (made.path, made.chat_template) == ("tokenizer.json", "{{ messages }}")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"library": "megatron", "vocab_file": "v", "merges_file": "m", "r2l": True}, "r2l=True"),
        ({"library": "huggingface", "model_name": "a/b", "special_tokens": {"sep_token": "x"}}, "sep_token"),
        ({"library": "null", "vocab_size": 9, "chat_template": "x"}, "chat_template='x'"),
        ({"library": "tabular", "model_name": "a/b"}, "one of sentencepiece, huggingface"),
        ({}, "needs tokenizer_model"),
    ],
)
def test_what_no_tokenizer_does_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        get_nmt_tokenizer(**arguments)


def test_a_normalizer_composes_what_a_text_decomposes(tmp_path: Path) -> None:
    """nmt_nfkc is the trainer's default."""
    import unicodedata

    from sentencepiece import SentencePieceTrainer

    texts = ["Tiếng Việt có dấu", "한국어 문장입니다", "plain words ﬁne"]
    (tmp_path / "corpus.txt").write_text("\n".join(texts * 20), encoding="utf-8")
    SentencePieceTrainer.Train(
        input=str(tmp_path / "corpus.txt"), model_prefix=str(tmp_path / "own"), vocab_size=60, hard_vocab_limit=False
    )
    tokenizer = SentencePieceTokenizer(tmp_path / "own.model")
    for text in texts:
        ids = tokenizer.text_to_ids(unicodedata.normalize("NFD", text))
        assert ids == tokenizer.text_to_ids(text) and tokenizer.unk_id not in ids
        assert tokenizer.ids_to_text(ids) == unicodedata.normalize("NFKC", text)
