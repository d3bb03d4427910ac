# SPDX-License-Identifier: Apache-2.0
"""``nemo2 data prepare``: makes token files of text."""

import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal, Optional

import typer

from nemo2.base.counts import counted
from nemo2.base.errors import ConfigError
from nemo2.base.files import refuse_existing, replacing
from nemo2.base.place import is_terminal
from nemo2.cli.adapter import Result
from nemo2.cli.commands import as_json
from nemo2.cli.flags import Prefix
from nemo2.data.token_files import strip_suffix, token_files


def prepare_data(
    inputs: list[str],
    *,
    output: Prefix,
    tokenizer: Optional[Path] = None,
    train_bpe: Annotated[Optional[int], typer.Option(min=256)] = None,
    text_key: str = "text",
    skip_bad_lines: bool = False,
    special_tokens: Literal["keep", "text", "fail"] = "keep",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False,
) -> Result:
    """Tokenize text into Megatron's indexed dataset.

    Each text file is one document. In a .jsonl, .json or .csv file, each record is one document.

    Args:
        inputs: Text files, .jsonl, .json or .csv files of records, directories, or glob patterns.
        output: Output prefix: writes PREFIX.bin, PREFIX.idx and PREFIX.json.
        tokenizer: Path of a tokenizer.json.
        train_bpe: First train a BPE tokenizer with this many tokens on the input.
        text_key: Key of the text in files of records.
        skip_bad_lines: Skip up to 1,000 unreadable lines instead of stopping.
        special_tokens: For text that spells a special token of the tokenizer: 'keep' that token, encode it as plain
            'text', or 'fail'.

    Example: nemo2 data prepare corpus/*.txt --output data/corpus --train-bpe 8192
    """
    on_bad_line = "skip" if skip_bad_lines else "fail"
    if (tokenizer is None) == (train_bpe is None):
        raise ConfigError("data prepare requires either --tokenizer PATH or --train-bpe N.")
    trained = Path(f"{strip_suffix(output)}_tokenizer.json")
    refuse_existing(*token_files(output), *[trained] * (train_bpe is not None), overwrite=overwrite)
    from nemo2.data import prepare
    from nemo2.data.tokenizer import BPETokenizer

    # A new tokenizer gets its name after the tokens: one without them would refuse the same command.
    with nullcontext(tokenizer or trained) if train_bpe is None else replacing(trained) as file:
        if train_bpe is not None:
            from nemo2.data.bpe import trained_bpe

            file.write_text(
                trained_bpe(list(inputs), train_bpe, text_key=text_key, on_bad_line=on_bad_line), encoding="utf-8"
            )
            tokenizer = trained
        prepared = prepare.prepare_data(
            list(inputs),
            output,
            BPETokenizer(str(file)),
            text_key=text_key,
            on_bad_line=on_bad_line,
            on_special_token=special_tokens,
            overwrite=overwrite,
            progress=is_terminal(sys.stdout) and not as_json(),
        )
    if train_bpe is not None and not as_json():
        print(f"tokenizer: {tokenizer}")
    skipped = f", {prepared.skipped_documents:,} skipped" if prepared.skipped_documents else ""
    text = f"{prepared.prefix}: {counted(prepared.documents, 'document')}{skipped}, {counted(prepared.tokens, 'token')}"
    if prepared.documents_with_special_tokens:
        text += (
            f"\n{prepared.documents_with_special_tokens:,} of the documents spell special tokens of the tokenizer, which the "
            + ("model reads as those tokens" if prepared.special_tokens == "keep" else "model reads as plain text")
        )
    if prepared.documents_with_unknown_text:
        text += (
            f"\n{prepared.documents_with_unknown_text:,} of the documents have text that the tokenizer has no tokens for, which "
            "became the unknown token"
        )
    return Result(asdict(prepared) | {"tokenizer": str(tokenizer)}, text)
