# SPDX-License-Identifier: Apache-2.0
"""Reads SentencePiece models without the package ``sentencepiece``.

A ``.model`` is a protocol buffer (``sentencepiece_model.proto`` of google/sentencepiece) with pieces and their scores,
rules of normalization, and special ids. The pieces and scores become a model of the ``tokenizers`` package, and the
rules become its normalizer. The ids of a text equal SentencePiece's.
"""

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

from nemo2.config.capture import configurable
from nemo2.data.tokenizer import Tokenizer
from nemo2.errors import DataError

SPACE = "\u2581"
"""The character that represents a space in pieces."""
_UNIGRAM, _BPE = 1, 2
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_UNKNOWN_TEXT = " \u2047 "
"""The text that SentencePiece writes for an unknown piece."""


class Piece(NamedTuple):
    text: str
    score: float
    kind: int


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The contents of a ``.model`` file."""

    pieces: list[Piece]
    model_type: int = _UNIGRAM
    byte_fallback: bool = False
    bos_id: int = 1
    eos_id: int = 2
    pad_id: int = -1
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True


@configurable
class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece tokenizer, "unigram" or "bpe", from its ``.model`` file. Control pieces in a text count as plain
    text.

    Args:
        model_path: The file.

    Raises:
        DataError: on first use, if the file is missing, is no SentencePiece model, or is a word or character model.
    """

    def __init__(self, model_path: Union[str, Path]) -> None:
        self.model_path = str(model_path)

    @cached_property
    def _bytes(self) -> bytes:
        try:
            return Path(self.model_path).expanduser().read_bytes()
        except OSError as error:
            raise DataError(f"The SentencePiece model {self.model_path} can't be read: {error.strerror}.") from error

    @cached_property
    def contents(self) -> Contents:
        """The file, parsed."""
        try:
            found = parsed(self._bytes)
        except (ValueError, IndexError, struct.error) as error:
            raise DataError(f"{self.model_path} is not a SentencePiece model: {error}.") from error
        if not found.pieces or found.model_type not in (_UNIGRAM, _BPE):
            raise DataError(f"{self.model_path} is not a SentencePiece model of kind unigram or bpe.")
        return found

    @cached_property
    def _tokenizer(self) -> Any:
        return _backend(self.contents)

    @property
    def vocab_size(self) -> int:
        return len(self.contents.pieces)

    def text_to_ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def text_to_tokens(self, text: str) -> list[str]:
        return [self.contents.pieces[token_id].text for token_id in self.text_to_ids(text)]

    def ids_to_text(self, ids: Sequence[int]) -> str:
        pieces = [self.contents.pieces[int(token_id)] for token_id in ids]
        pieces = [piece for piece in pieces if piece.kind not in (_CONTROL, _UNUSED)]
        texts = [piece.text for piece in pieces]
        removed = len(texts) if self.contents.remove_extra_whitespaces else int(self.contents.add_dummy_prefix)
        for at in range(min(removed, len(texts))):  # leading spaces that the normalizer adds or removes
            texts[at] = texts[at].removeprefix(SPACE)
            if texts[at]:
                break
        written = (_bytes_of(piece, text) for piece, text in zip(pieces, texts, strict=True))
        return b"".join(written).decode("utf-8", errors="replace")

    @property
    def eos_id(self) -> Optional[int]:
        return self._id(self.contents.eos_id)

    @property
    def bos_id(self) -> Optional[int]:
        return self._id(self.contents.bos_id)

    @property
    def pad_id(self) -> Optional[int]:
        return self._id(self.contents.pad_id)

    @property
    def unk_id(self) -> Optional[int]:
        return _unknown(self.contents)

    def _id(self, token_id: int) -> Optional[int]:
        return token_id if 0 <= token_id < self.vocab_size else None

    @property
    def unique_identifiers(self) -> "OrderedDict[str, Any]":
        # The contents and not the path: a copy of the file elsewhere is the same tokenizer.
        return OrderedDict([("class", type(self).__name__), ("sha256", hashlib.sha256(self._bytes).hexdigest())])

    def __getstate__(self) -> dict[str, Any]:
        """The state without the loaded model, which each worker process loads itself."""
        return {"model_path": self.model_path}

    def __repr__(self) -> str:
        return f"SentencePieceTokenizer({self.model_path!r})"


def parsed(data: bytes) -> Contents:
    """Parse a ``ModelProto``. Raises ValueError, IndexError or struct.error for other data."""
    pieces: list[Piece] = []
    settings: dict[str, Any] = {}
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(value))
            pieces.append(
                Piece(piece[1].decode(), struct.unpack("<f", piece.get(2, bytes(4)))[0], piece.get(3, _NORMAL))
            )
        elif number in _SETTINGS:
            names = _SETTINGS[number]
            settings |= {names[field]: one for field, one in _fields(value) if field in names}
    return Contents(pieces=pieces, **settings)


_SETTINGS = {
    2: {3: "model_type", 35: "byte_fallback", 41: "bos_id", 42: "eos_id", 43: "pad_id"},
    3: {2: "charsmap", 3: "add_dummy_prefix", 4: "remove_extra_whitespaces"},
}
"""Fields of ``TrainerSpec`` and ``NormalizerSpec``, by their numbers in ``ModelProto``."""


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a message: integers or bytes. Raises ValueError if the message ends within a field."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield number, value - (1 << 64) if value >> 63 else value
            continue
        if kind not in (1, 2, 5):
            raise ValueError(f"a field of kind {kind}")
        size, at = _varint(data, at) if kind == 2 else (8 if kind == 1 else 4, at)
        if at + size > len(data):
            raise ValueError("it ends too early")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("a number of more than 64 bits")


def _unknown(contents: Contents) -> int:
    return next(token_id for token_id, piece in enumerate(contents.pieces) if piece.kind == _UNKNOWN)


def _backend(contents: Contents) -> Any:
    from tokenizers import Regex, models, normalizers
    from tokenizers import Tokenizer as Tokenizers

    names = [_name(token_id, piece) for token_id, piece in enumerate(contents.pieces)]
    unknown = _unknown(contents)
    if contents.model_type == _UNIGRAM:
        scored = [(name, piece.score) for name, piece in zip(names, contents.pieces, strict=True)]
        model: Any = models.Unigram(scored, unk_id=unknown, byte_fallback=bool(contents.byte_fallback))
    else:
        vocabulary = {name: token_id for token_id, name in enumerate(names)}
        model = models.BPE(
            vocabulary,
            _merges(contents.pieces, vocabulary),
            unk_token=names[unknown],
            fuse_unk=True,
            byte_fallback=bool(contents.byte_fallback),
        )
    made = Tokenizers(model)
    own = [
        (piece.text, name) for name, piece in zip(names, contents.pieces, strict=True) if piece.kind == _USER_DEFINED
    ]
    steps: list[Any] = [normalizers.Replace(*one) for one in sorted(own, key=lambda one: -len(one[0]))]
    steps += [normalizers.Precompiled(contents.charsmap)] if contents.charsmap else []
    if contents.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    steps += [normalizers.Prepend(SPACE)] if contents.add_dummy_prefix else []
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    return made


def _name(token_id: int, piece: Piece) -> str:
    """The name of a piece in the backend's vocabulary.

    A piece that no text can be split into gets a name that no text contains. A piece that is never split gets a
    private-use character, which the normalizer substitutes for it.
    """
    if piece.kind == _USER_DEFINED:
        return chr(0x100000 + token_id)
    return f"\0{token_id}" if piece.kind in (_UNKNOWN, _CONTROL, _UNUSED) else piece.text


def _merges(pieces: Sequence[Piece], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """The pairs that make each piece, in the order of its score, because SentencePiece first merges the pair that
    makes the best piece."""
    found = []
    for piece in pieces:
        if piece.kind != _NORMAL:
            continue
        cuts = [(piece.text[:at], piece.text[at:]) for at in range(1, len(piece.text))]
        pairs = [(left, right) for left, right in cuts if left in vocabulary and right in vocabulary]
        found += [(-piece.score, vocabulary[left], vocabulary[right], (left, right)) for left, right in pairs]
    return [pair for *_, pair in sorted(found)]


def _bytes_of(piece: Piece, text: str) -> bytes:
    if piece.kind == _BYTE:
        return bytes([int(text[1:-1], 16)])  # "<0x0A>"
    return (_UNKNOWN_TEXT if piece.kind == _UNKNOWN else text.replace(SPACE, " ")).encode()
