# SPDX-License-Identifier: Apache-2.0
"""Trains a byte-level BPE tokenizer on your own text."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Union

from nemo2.base.counts import is_count
from nemo2.base.errors import ConfigError, DataError
from nemo2.base.files import replaceable_file, write_file
from nemo2.data.documents import BadInput, Inputs, OnBadLine, find_files, read_documents
from nemo2.data.tokenizer import END_OF_DOCUMENT, BPETokenizer

_BYTES = 256


def train_bpe(
    source: Union[Inputs, Iterator[str]],
    vocab_size: int,
    output: Union[str, Path],
    special_tokens: Sequence[str] = END_OF_DOCUMENT[:1],
    *,
    text_key: str = "text",
    on_bad_line: OnBadLine = "fail",
    max_bad_lines: int = 1000,
    show_progress: bool = False,
) -> BPETokenizer:
    """Train a tokenizer on `source` and write a ``tokenizer.json``. The same text gives the same file.

    The tokenizer is byte-level with GPT-2's splitting, so it encodes every text and decodes it unchanged.

    Args:
        source: Text files, directories or patterns as for `prepare_data` (a path or a list of paths). Any other
            iterable is taken as the texts themselves.
        vocab_size: The number of ids, including special tokens and the 256 bytes. A short text gives fewer.
        output: The file to write. It is written completely or not at all.
        special_tokens: Tokens that take the first ids, in this order. The first one ends documents.
        text_key, on_bad_line, max_bad_lines: See `prepare_data`.
        show_progress: Show a bar on the terminal.

    Raises:
        ConfigError: the vocabulary is too small for the bytes and special tokens, or no file can be written to `output`.
        DataError: there is no text, or some of it is unreadable.
    """
    output = replaceable_file(output)
    text = trained_bpe(
        source,
        vocab_size,
        special_tokens,
        text_key=text_key,
        on_bad_line=on_bad_line,
        max_bad_lines=max_bad_lines,
        show_progress=show_progress,
    )
    write_file(output, text)
    return BPETokenizer(output, eos_token=special_tokens[0] if special_tokens else None)


def trained_bpe(
    source: Union[Inputs, Iterator[str]],
    vocab_size: int,
    special_tokens: Sequence[str] = END_OF_DOCUMENT[:1],
    *,
    text_key: str = "text",
    on_bad_line: OnBadLine = "fail",
    max_bad_lines: int = 1000,
    show_progress: bool = False,
) -> str:
    """The contents of the file that `train_bpe` writes. Arguments and errors are those of `train_bpe`."""
    least = _BYTES + len(special_tokens)
    if not is_count(vocab_size, least):
        raise ConfigError(
            f"vocab_size={vocab_size!r}: must be at least {least}, for the {_BYTES} bytes and the "
            f"{len(special_tokens)} special tokens."
        )
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=show_progress,
    )
    texts: Iterable[str]
    if isinstance(source, (str, Path, list, tuple)):
        bad = BadInput(on_bad_line, max_bad_lines)
        texts = (text for _, text in read_documents(find_files(source), text_key=text_key, bad=bad))
    else:
        texts = source  # pyright: ignore[reportAssignmentType]
    characters = 0

    def counted() -> Iterator[str]:
        nonlocal characters
        for text in texts:
            characters += len(text)
            yield text

    tokenizer.train_from_iterator(counted(), trainer=trainer)
    if characters == 0:
        raise DataError("There is no text to train a tokenizer on, because all inputs are empty.")
    return tokenizer.to_str(pretty=True)
