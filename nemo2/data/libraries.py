# SPDX-License-Identifier: Apache-2.0
"""Tokenizers by NeMo 2.0's names of libraries."""

from typing import Any, Optional

from nemo2.config.capture import configurable
from nemo2.data.tokenizer import (
    AutoTokenizer,
    BPETokenizer,
    ByteTokenizer,
    GPT2BPETokenizer,
    NullTokenizer,
    Tokenizer,
)
from nemo2.errors import ConfigError
from nemo2.names import did_you_mean


@configurable
def get_nmt_tokenizer(
    library: str = "huggingface",
    model_name: Optional[str] = None,
    tokenizer_model: Optional[str] = None,
    vocab_file: Optional[str] = None,
    merges_file: Optional[str] = None,
    vocab_size: Optional[int] = None,
    use_fast: bool = True,
    trust_remote_code: bool = False,
) -> Tokenizer:
    """A tokenizer by NeMo 2.0's names of libraries.

    Args:
        library: "huggingface" (``model_name``, a name or a folder), "null" (``vocab_size``, to which the end-of-document id is
            added), "byte-level", or "megatron" (GPT-2's byte pairs, by ``vocab_file`` and ``merges_file``).
        tokenizer_model: A ``tokenizer.json`` for "huggingface", in place of ``model_name``.
        use_fast, trust_remote_code: As `AutoTokenizer`.

    Raises:
        ConfigError: another library, or a name that it needs is missing.
    """
    if library == "huggingface" and tokenizer_model is not None:
        return BPETokenizer(tokenizer_model)
    makers: dict[str, tuple[tuple[str, ...], Any]] = {
        "huggingface": (
            ("model_name",),
            lambda: AutoTokenizer(model_name, use_fast=use_fast, trust_remote_code=trust_remote_code),  # pyright: ignore
        ),
        "null": (("vocab_size",), lambda: NullTokenizer((vocab_size or 0) + 1)),
        "byte-level": ((), ByteTokenizer),
        "megatron": (
            ("vocab_file", "merges_file"),
            lambda: GPT2BPETokenizer(vocab_file, merges_file),  # pyright: ignore[reportArgumentType]
        ),
    }
    if library not in makers:
        raise ConfigError(
            f"get_nmt_tokenizer(library={library!r}): one of {', '.join(makers)}{did_you_mean(library, makers)} SentencePiece "
            "models are read by transformers: library='huggingface' with their folder."
        )
    needed, make = makers[library]
    given = {"model_name": model_name, "vocab_size": vocab_size, "vocab_file": vocab_file, "merges_file": merges_file}
    if missing := [name for name in needed if given[name] is None]:
        raise ConfigError(f"get_nmt_tokenizer(library={library!r}) needs {' and '.join(missing)}.")
    return make()
