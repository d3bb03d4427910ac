# SPDX-License-Identifier: Apache-2.0
"""A tokenizer's identity, as plain data and as a hash: two tokenizers with one identity give the same ids."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from nemo2.data.tokenizer import Tokenizer


def identity_of(tokenizer: Tokenizer) -> dict[str, Any]:
    """The tokenizer's own identifiers, and for a fast Hugging Face one a hash of all that it does: its merges, how it splits."""
    found = dict(tokenizer.unique_identifiers)
    backend = getattr(getattr(tokenizer, "tokenizer", None), "backend_tokenizer", None)
    if backend is not None:
        found["pipeline"] = hashlib.sha256(backend.to_str().encode("utf-8", "surrogatepass")).hexdigest()
    return found


def key_of(facts: Mapping[str, Any]) -> str:
    """A short name for these facts, the same in every process."""
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
