# SPDX-License-Identifier: Apache-2.0
"""Creates tokenizers by NeMo 2.0's library names."""

from typing import Any, Optional

from nemo2.base.errors import ConfigError
from nemo2.base.names import did_you_mean
from nemo2.config.capture import configurable
from nemo2.data.sentencepiece import SentencePieceTokenizer
from nemo2.data.tokenizer import AutoTokenizer, BPETokenizer, ByteTokenizer, GPT2BPETokenizer, NullTokenizer, Tokenizer


@configurable
def get_nmt_tokenizer(
    library: str = "sentencepiece",
    model_name: Optional[str] = None,
    tokenizer_model: Optional[str] = None,
    vocab_file: Optional[str] = None,
    merges_file: Optional[str] = None,
    special_tokens: Optional[dict[str, str]] = None,
    use_fast: bool = True,
    bpe_dropout: float = 0.0,
    r2l: bool = False,
    legacy: bool = False,
    delimiter: Optional[str] = None,
    trust_remote_code: bool = False,
    chat_template: Optional[str] = None,
    vocab_size: Optional[int] = None,
) -> Tokenizer:
    """Create a tokenizer by NeMo 2.0's library name.

    Args:
        library: "sentencepiece" (needs ``tokenizer_model``, a ``.model`` file), "huggingface" (``model_name``, a name
            or a folder), "null" (``vocab_size``, to which the end-of-document id is added), "byte-level", or "megatron"
            (GPT-2's BPE from ``vocab_file`` and ``merges_file``, or with ``model_name="GPTSentencePieceTokenizer"`` the
            same as "sentencepiece").
        model_name: With "huggingface", a release's name or a folder.
        tokenizer_model: With "huggingface", a ``tokenizer.json`` in place of ``model_name``.
        vocab_file: With "megatron", GPT-2's ``vocab.json``.
        merges_file: With "megatron", GPT-2's ``merges.txt``.
        special_tokens: With "huggingface", ``eos_token``, ``bos_token`` and ``pad_token``, which override its files.
        use_fast, trust_remote_code, chat_template: As in `AutoTokenizer`.
        bpe_dropout, r2l, legacy, delimiter: Options of NeMo's translation tokenizers, which are rejected.
        vocab_size: With "null", the number of ids without the end-of-document id.

    Raises:
        ConfigError: an unknown library, a missing argument that the library needs, or an unsupported argument.
    """
    _refuse("get_nmt_tokenizer", bpe_dropout=bpe_dropout, r2l=r2l, legacy=legacy, delimiter=delimiter)
    if library == "megatron" and model_name == "GPTSentencePieceTokenizer":
        library = "sentencepiece"
    needs = {
        "sentencepiece": "tokenizer_model",
        "huggingface": "model_name",
        "null": "vocab_size",
        "byte-level": "",
        "megatron": "vocab_file and merges_file",
    }
    if library not in needs:
        raise ConfigError(
            f"get_nmt_tokenizer(library={library!r}): must be one of "
            f"{', '.join(needs)}{did_you_mean(library, needs, listed=True)}"
        )
    if library != "huggingface":
        _refuse(f"library={library!r}", special_tokens=special_tokens, chat_template=chat_template)
    options: dict[str, Any] = {"chat_template": chat_template, **_known_tokens(special_tokens)}
    match library:
        case "huggingface" if tokenizer_model is not None:
            return BPETokenizer(tokenizer_model, **options)
        case "huggingface" if model_name is not None:
            return AutoTokenizer(model_name, use_fast=use_fast, trust_remote_code=trust_remote_code, **options)
        case "sentencepiece" if tokenizer_model is not None:
            return SentencePieceTokenizer(tokenizer_model)
        case "null" if vocab_size is not None:
            return NullTokenizer(vocab_size + 1)
        case "byte-level":
            return ByteTokenizer()
        case "megatron" if vocab_file is not None and merges_file is not None:
            return GPT2BPETokenizer(vocab_file, merges_file)
    raise ConfigError(f"get_nmt_tokenizer(library={library!r}) needs {needs[library]}.")


@configurable
def get_tokenizer(
    tokenizer_name: str,
    tokenizer_model: Optional[str] = None,
    vocab_file: Optional[str] = None,
    merges_file: Optional[str] = None,
    special_tokens: Optional[dict[str, str]] = None,
    use_fast: bool = True,
    bpe_dropout: float = 0.0,
    chat_template: Optional[str] = None,
) -> Tokenizer:
    """Create a tokenizer by the name of a Hugging Face release, or with "sentencepiece" from its ``tokenizer_model``.

    Args:
        tokenizer_name: The name of a Hugging Face release, a folder, or "sentencepiece".
        tokenizer_model: The ``.model`` file of "sentencepiece", or a ``tokenizer.json`` in place of ``tokenizer_name``.
        vocab_file, merges_file: GPT-2's files, in place of those of ``tokenizer_name``.
        special_tokens, use_fast, bpe_dropout, chat_template: As in `get_nmt_tokenizer`.

    Raises:
        ConfigError: as in `get_nmt_tokenizer`.
    """
    if tokenizer_name == "sentencepiece":
        library = "sentencepiece"
    else:
        library = "huggingface" if vocab_file is None and merges_file is None else "megatron"
    return get_nmt_tokenizer(
        library,
        tokenizer_name,
        tokenizer_model,
        vocab_file,
        merges_file,
        special_tokens,
        use_fast,
        bpe_dropout,
        chat_template=chat_template,
    )


_TOKENS = ("eos_token", "bos_token", "pad_token")


def _known_tokens(special_tokens: Optional[dict[str, str]]) -> dict[str, Any]:
    if unknown := sorted((special_tokens or {}).keys() - set(_TOKENS)):
        raise ConfigError(
            f"special_tokens[{unknown[0]!r}]: must be one of {', '.join(_TOKENS)}. The tokenizer's files define all others."
        )
    return dict(special_tokens or {})


def _refuse(what: str, **options: Any) -> None:
    if unsupported := [f"{name}={value!r}" for name, value in options.items() if value]:
        raise ConfigError(
            f"{what}: nemo2's tokenizers don't support {', '.join(unsupported)}. "
            f"Leave {'it' if len(unsupported) == 1 else 'them'} out."
        )
