# SPDX-License-Identifier: Apache-2.0
"""The names of token files, ``PREFIX.bin`` and ``PREFIX.idx``, and their description in ``PREFIX.json``."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, Union

from nemo2.base.files import read_bounded

if TYPE_CHECKING:
    from nemo2.data.special_text import OnSpecialToken

FORMAT = 1
_MOST_DESCRIPTION = 16 << 20
SUFFIXES = (".bin", ".idx", ".json")


@dataclass(frozen=True, kw_only=True)
class PreparedData:
    """The contents of a pair of token files: the fields of ``PREFIX.json``, except for the prefix itself."""

    prefix: str
    """The path of the files without their suffix."""
    documents: int
    """Written documents."""
    tokens: int
    """Written tokens, with the end-of-document tokens."""
    characters: int
    """Characters of the written documents."""
    empty_documents: int
    """Documents without text, which were left out."""
    skipped_documents: int
    """Documents that aren't text, which were left out."""
    skipped_examples: list[str] = field(default_factory=list)
    """The places of some of the skipped documents."""
    documents_with_special_tokens: int = 0
    """Written documents whose text spells a special token of the tokenizer."""
    special_tokens: "OnSpecialToken" = "keep"
    """What such a text became: the special token ("keep"), or plain text ("text")."""
    documents_with_unknown_text: int = 0
    """Written documents with text that the tokenizer has no tokens for, which became its unknown token."""
    vocab_size: int
    """The number of ids of the tokenizer."""
    eod: Optional[int]
    """The id that ends documents. None: documents have no end token."""
    max_token_id: int
    """The largest written id."""
    dtype: str
    """The type of a token in the .bin file, in NumPy's terms."""
    bin_bytes: int
    """The size of the .bin file."""
    tokenizer: dict[str, Any]
    """The description of the tokenizer."""
    sha256: dict[str, str]
    """The digests of the .bin and the .idx file."""
    format: int = FORMAT
    """The version of this description."""


def strip_suffix(path: Union[str, Path]) -> str:
    """The prefix of a pair of token files, also if ``path`` names one of the two files."""
    return str(path).removesuffix(".bin").removesuffix(".idx")


def token_files(path: Union[str, Path]) -> list[str]:
    """The token files of a prefix, or of the one of them that ``path`` names."""
    return [f"{strip_suffix(path)}{suffix}" for suffix in SUFFIXES]


def read_sidecar(prefix: Union[str, Path]) -> Optional[PreparedData]:
    """The description of ``PREFIX.bin`` in ``PREFIX.json``. None: there is none, or it describes other files.

    Other tools write token files without such a file, and a .json of that name may have any contents.
    """
    try:
        contents = json.loads(read_bounded(f"{prefix}.json", at_most=_MOST_DESCRIPTION))
        described = PreparedData(prefix=str(prefix), **contents)
        if described.format == FORMAT and os.path.getsize(f"{prefix}.bin") == described.bin_bytes:
            return described
    except (OSError, ValueError, TypeError, RecursionError):
        pass
    return None
