# SPDX-License-Identifier: Apache-2.0
"""``nemo2 prepare-data``, for use before a run, and ``nemo2 report``, for use after it."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal, Optional

import typer

from nemo2.cli.flags import AsJson, print_json
from nemo2.cli.run_names import Run, run_folder
from nemo2.run_dir.terminal import is_terminal

PREPARE_EXAMPLE = "Example: nemo2 prepare-data corpus/*.txt --output data/corpus --train-bpe 8192"
REPORT_EXAMPLE = "Example: nemo2 report nemo_experiments/llama_tiny/2026-01-31_12-00-00"


def register(app: typer.Typer) -> None:
    app.command("prepare-data", epilog=PREPARE_EXAMPLE)(prepare_data)
    app.command("report", epilog=REPORT_EXAMPLE)(report)


def prepare_data(
    inputs: Annotated[
        list[str],
        typer.Argument(help="Text files, .jsonl, .json or .csv files of records, directories, or glob patterns."),
    ],
    output: Annotated[Path, typer.Option(help="Output prefix: writes PREFIX.bin, PREFIX.idx and PREFIX.json.")],
    tokenizer: Annotated[Optional[Path], typer.Option(help="Path of a tokenizer.json.")] = None,
    train_bpe: Annotated[
        Optional[int], typer.Option(min=256, help="First train a BPE tokenizer with this many tokens on the input.")
    ] = None,
    text_key: Annotated[str, typer.Option(help="Key of the text in files of records.")] = "text",
    skip_bad_lines: Annotated[
        bool, typer.Option("--skip-bad-lines", help="Skip up to 1,000 unreadable lines instead of stopping.")
    ] = False,
    special_tokens: Annotated[
        Literal["keep", "text", "fail"],
        typer.Option(
            help="For text that spells a special token of the tokenizer: 'keep' that token, encode it as plain 'text', or 'fail'."
        ),
    ] = "keep",
    as_json: AsJson = False,
) -> None:
    """Tokenize text into Megatron's indexed dataset.

    Each text file is one document. In a .jsonl, .json or .csv file, each record is one document.
    """
    from nemo2.errors import ConfigError

    on_bad_line = "skip" if skip_bad_lines else "fail"
    if (tokenizer is None) == (train_bpe is None):
        raise ConfigError("prepare-data requires either --tokenizer PATH or --train-bpe N.")
    from nemo2.data import prepare
    from nemo2.data.tokenizer import BPETokenizer

    if train_bpe is not None:
        from nemo2.data.bpe import train_bpe as train

        tokenizer = output.with_name(f"{output.name}_tokenizer.json")
        output.parent.mkdir(parents=True, exist_ok=True)
        train(list(inputs), vocab_size=train_bpe, output=tokenizer, text_key=text_key, on_bad_line=on_bad_line)
        if not as_json:
            print(f"tokenizer: {tokenizer}")
    prepared = prepare.prepare_data(
        list(inputs),
        output,
        BPETokenizer(str(tokenizer)),
        text_key=text_key,
        on_bad_line=on_bad_line,
        on_special_token=special_tokens,
        progress=is_terminal(sys.stdout) and not as_json,
    )
    if as_json:
        print_json(asdict(prepared) | {"tokenizer": str(tokenizer)})
        return
    skipped = f", {prepared.skipped_documents:,} skipped" if prepared.skipped_documents else ""
    print(f"{prepared.prefix}: {prepared.documents:,} documents{skipped}, {prepared.tokens:,} tokens")
    if prepared.documents_with_special_tokens:
        print(
            f"{prepared.documents_with_special_tokens:,} of the documents spell special tokens of the tokenizer, which the "
            + ("model reads as those tokens" if prepared.special_tokens == "keep" else "model reads as plain text")
        )
    if prepared.documents_with_unknown_text:
        print(
            f"{prepared.documents_with_unknown_text:,} of the documents have text that the tokenizer has no tokens for, which "
            "became the unknown token"
        )


def report(
    run: Run,
) -> None:
    """Write report.html with the loss curve of a run.

    The run may still be training.
    """
    from nemo2.run_dir.report import write_report

    print(write_report(run_folder(run)))
