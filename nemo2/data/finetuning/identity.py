# SPDX-License-Identifier: Apache-2.0
"""A tokenizer's identity, as plain data and as a hash. Two tokenizers with the same identity give the same ids."""

import hashlib
import json
import string
from collections.abc import Mapping
from typing import Any

from nemo2.data.tokenizer import Tokenizer


def identity_of(tokenizer: Tokenizer) -> dict[str, Any]:
    """The tokenizer's own identifiers. For a fast Hugging Face tokenizer, also a hash of its whole state, such as
    merges and splitting rules."""
    identity = dict(getattr(tokenizer, "unique_identifiers", None) or _from_ids(tokenizer))
    backend = getattr(getattr(tokenizer, "tokenizer", None), "backend_tokenizer", None)
    if backend is not None:
        identity["pipeline"] = hashlib.sha256(backend.to_str().encode("utf-8", "surrogatepass")).hexdigest()
    return identity


def _from_ids(tokenizer: Any) -> dict[str, Any]:
    """The identity of a user's class without identifiers: its ids for every printable character and for some words."""
    text = f"{string.printable} The quick brown fox jumps over the lazy dog. In 2026, 3 + 4 = 7;\n\treturn None"
    ids = json.dumps([int(one) for one in tokenizer.text_to_ids(text)])
    kind = f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__}"
    return {"class": kind, "vocab_size": tokenizer.vocab_size, "ids": hashlib.sha256(ids.encode()).hexdigest()}


def key_of(facts: Mapping[str, Any]) -> str:
    """A short name for these facts, the same in every process."""
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
