# SPDX-License-Identifier: Apache-2.0
"""SentencePiece models, read by the package ``sentencepiece``: its normalizers have no exact counterpart elsewhere."""

import hashlib
import re
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Optional, Union

from nemo2.base.errors import DataError
from nemo2.config.capture import configurable
from nemo2.data.tokenizer import Tokenizer

_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")
"""The first line of a file of tiktoken: a token in base64 and its rank."""


@configurable
class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece tokenizer, from its ``.model`` file. Control pieces in a text count as plain text.

    Args:
        model_path: The file.

    Raises:
        DataError: on first use, if the file is missing or is no SentencePiece model.
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
    def _processor(self) -> Any:
        from sentencepiece import SentencePieceProcessor

        if _TIKTOKEN.match(self._bytes):
            raise DataError(
                f"{self.model_path} is not a SentencePiece model: it is a file of tiktoken. Use AutoTokenizer with the folder of "
                "its Hugging Face release."
            )
        processor: Any = SentencePieceProcessor()
        try:
            loaded = processor.LoadFromSerializedProto(self._bytes)
        except (RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise DataError(f"{self.model_path} is not a SentencePiece model: {reason}.") from error
        if not loaded or not processor.GetPieceSize():
            raise DataError(f"{self.model_path} is not a SentencePiece model: it has no pieces.")
        return processor

    @property
    def vocab_size(self) -> int:
        return self._processor.GetPieceSize()

    def text_to_ids(self, text: str) -> list[int]:
        return self._processor.EncodeAsIds(text)

    def text_to_tokens(self, text: str) -> list[str]:
        return [self._processor.IdToPiece(token_id) for token_id in self.text_to_ids(text)]

    def ids_to_text(self, ids: Sequence[int]) -> str:
        return self._processor.DecodeIds([int(token_id) for token_id in ids])

    @property
    def eos_id(self) -> Optional[int]:
        return self._id(self._processor.eos_id())

    @property
    def bos_id(self) -> Optional[int]:
        return self._id(self._processor.bos_id())

    @property
    def pad_id(self) -> Optional[int]:
        return self._id(self._processor.pad_id())

    @property
    def unk_id(self) -> Optional[int]:
        return self._id(self._processor.unk_id())

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
