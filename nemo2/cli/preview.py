# SPDX-License-Identifier: Apache-2.0
"""``nemo2 data preview``: prints samples as a model sees them, with the trained tokens marked."""

import codecs
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional, TextIO

import typer

from nemo2.base.errors import ConfigError
from nemo2.base.names import did_you_mean
from nemo2.cli.adapter import AT_LEAST_1, Result
from nemo2.cli.commands import as_json
from nemo2.cli.flags import set_option
from nemo2.cli.own_data import Data
from nemo2.cli.sources import changed, configured
from nemo2.data.documents import holds_records

if TYPE_CHECKING:
    from rich.text import Text

    from nemo2.data.finetuning.base import SampleDataModule
    from nemo2.data.finetuning.sample import Sample
    from nemo2.data.tokenizer import Tokenizer

Split = Literal["train", "validation", "test"]
BEGIN, END = "⟦", "⟧"
"""Marks around trained tokens, in output without colours."""


def preview_data(
    source: str,
    overrides: Optional[list[str]] = None,
    *,
    samples: Annotated[int, AT_LEAST_1] = 3,
    split: Split = "train",
    tokenizer: Optional[str] = None,
    seq_length: Annotated[Optional[int], AT_LEAST_1] = None,
    chat_template: Optional[str] = None,
    own_data: Data = None,
    everything: Annotated[bool, typer.Option("--all")] = False,
) -> Result:
    """Print samples of fine-tuning data, with the trained tokens marked.

    Trained tokens, which the loss counts, are in color, or in double brackets without colors.

    Args:
        source: A file or directory, a data set by name such as 'squad' or 'dolly(seq_length=512)', or a recipe.
        overrides: Changes to the data as in a recipe, such as data.dataset_kwargs.on_bad_line=skip.
        samples: Number of samples to print.
        split: Split of the data.
        tokenizer: A tokenizer.json, or the directory or hub name of a Hugging Face tokenizer.
        seq_length: Tokens per sample, if SOURCE is a file or directory.
        chat_template: A chat template, if SOURCE is a file or directory: a file, or 'plain'.
        everything: Tokenize (and pack) the whole split, cache it for the run, and report skipped records.

    Example: nemo2 data preview chats/training.jsonl --tokenizer models/qwen --samples 2
    """
    from rich.console import Console

    if holds_records(Path(source)) and not Path(source).exists():
        raise ConfigError(f"{source}: there is no such file.")
    if Path(source).exists() and not _is_recipe(Path(source)):
        if own_data is not None:
            raise ConfigError(
                f"--data {own_data}: {source} is no recipe. Name one file or directory, or a recipe and its data."
            )
        data = _of_files(source, overrides or [], seq_length, chat_template)
    else:
        for option, value in (("--seq-length", seq_length), ("--chat-template", chat_template)):
            if value is not None:
                raise ConfigError(
                    f"{option} {value}: {source} is not a file or directory, and sets this itself. To change it, write "
                    "data.seq_length=512 behind a recipe, or 'dolly(seq_length=512)' for a data set."
                )
        data = _configured(source, overrides or [], own_data, own_tokenizer=tokenizer is not None)
    if tokenizer is not None:
        data.tokenizer = tokenizer_called(tokenizer)
    console = Console(soft_wrap=True, highlight=False)
    data.fetch()
    if as_json():
        return Result(_as_data(data, split, samples, everything=everything))
    for where, sample in islice(_samples(data, split), samples):
        cut = ", truncated" if sample.truncated else ""
        console.print(
            f"{where}: {len(sample.ids)} tokens, {sample.num_trained} trained on{cut}", style="bold", markup=False
        )
        console.print(marked(sample, data.tokenizer, colours=console.is_terminal and not console.no_color))
        console.print()
    if everything:
        data.build_datasets([split])
        console.print(str(data.reports.get(split, "no records")), markup=False)
        if split in data.fullness:
            console.print(str(data.fullness[split]), markup=False)
    return Result(None)


def _as_data(data: "SampleDataModule", split: str, samples: int, *, everything: bool) -> dict[str, Any]:
    rows = [
        {
            "place": where,
            "tokens": len(one.ids),
            "trained_tokens": one.num_trained,
            "truncated": one.truncated,
            "ids": one.ids,
            "trained": one.trained,
            "text": spelled(one.ids, data.tokenizer),
        }
        for where, one in islice(_samples(data, split, complaints=sys.stderr), samples)
    ]
    result: dict[str, Any] = {"split": split, "samples": rows}
    if everything:
        data.build_datasets([split])
        report = data.reports.get(split)
        result["report"] = None if report is None else dataclasses.asdict(report)
    return result


def tokenizer_called(name: str) -> "Tokenizer":
    """The tokenizer in a ``tokenizer.json`` or a folder with that file, or the Hugging Face tokenizer of that name or
    folder."""
    from nemo2.data.tokenizer import AutoTokenizer, BPETokenizer

    path = Path(name).expanduser()
    plain = path.is_file() or (path.is_dir() and not (path / "tokenizer_config.json").is_file())
    return BPETokenizer(path) if plain else AutoTokenizer(name)


def marked(sample: "Sample", tokenizer: Optional["Tokenizer"], *, colours: bool) -> "Text":
    """The text of a sample, with the trained tokens in green or in double brackets."""
    from rich.text import Text

    text = Text()
    place = 0
    for trained, run in groupby(sample.trained):
        count = len(list(run))
        words = spelled(sample.ids[place : place + count], tokenizer)
        place += count
        if colours:
            text.append(words, style="green" if trained else "dim")
        else:
            text.append(f"{BEGIN}{words}{END}" if trained else words)
    return text


def spelled(ids: Sequence[int], tokenizer: Optional["Tokenizer"]) -> str:
    """The text of token ids, including special tokens."""
    if tokenizer is None:
        return " ".join(map(str, ids))
    for name in ("tokenizer", "backend"):
        inside = getattr(tokenizer, name, None)
        if inside is not None:
            return inside.decode(list(ids), skip_special_tokens=False)
    pieces = ((end, list(part)) for end, part in groupby(ids, key=lambda token: token == tokenizer.eos_id))
    return "".join("<eos>" * len(part) if end else tokenizer.ids_to_text(part) for end, part in pieces)


def _samples(
    data: "SampleDataModule", split: str, *, complaints: Optional[TextIO] = None
) -> Iterator[tuple[str, "Sample"]]:
    """The first samples, each with the position of its record. A record that makes no sample is reported at its place
    in the output, on ``complaints`` or standard output.

    Raises:
        DataError: no record makes a sample.
    """
    from nemo2.data.finetuning.encode import BadRecords, encode_all, nothing_left

    source = data.source(split)
    if source is None:
        raise ConfigError(f"--split {split}: there are no such records.")
    limits, encoder = data.settings.limits(data.seq_length + 1), data.encoder()
    every = BadRecords(limits)
    for where, record in source.records(every):
        bad = BadRecords(limits)
        yield from ((where, sample) for sample in encode_all([(where, record)], encoder, bad))
        if bad.into.samples == 0:
            print(str(bad.into).partition("\n")[2], file=complaints)
        every.into.records += bad.into.records
        every.into.samples += bad.into.samples
    if every.into.samples == 0:
        raise nothing_left(source.name, every.into)


def _is_recipe(path: Path) -> bool:
    if path.suffix == ".json" and path.is_file():
        # Records are an array, or objects without a recipe's root.
        with open(path, "rb") as text:
            start = text.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()
        return not (start[:1] == b"[" or (start[:1] == b"{" and b'"root"' not in start))
    return path.suffix == ".py" or (path / "recipe.json").is_file()


def _of_files(
    path: str, overrides: list[str], seq_length: Optional[int], chat_template: Optional[str]
) -> "SampleDataModule":
    import fiddle as fdl

    from nemo2.config import Config, Partial
    from nemo2.data.finetuning.hf_dataset import HFDatasetDataModule
    from nemo2.data.tokenizer import ByteTokenizer
    from nemo2.llm.api import finetune

    config = Config(HFDatasetDataModule, path_or_dataset=path, seq_length=2048)
    config = changed(lambda: Partial(finetune, data=config), overrides).data
    if seq_length is not None:
        set_option(config, "seq_length", seq_length, option="--seq-length", path="data.seq_length")
    if chat_template is not None:
        settings = config.dataset_kwargs or {}
        if (other := settings.get("chat_template", chat_template)) != chat_template:
            raise ConfigError(
                f"--chat-template {chat_template} contradicts data.dataset_kwargs.chat_template={other}: leave one of "
                "them out."
            )
        config.dataset_kwargs = {**settings, "chat_template": chat_template}
    data: Any = fdl.build(config)
    data.tokenizer = data.tokenizer or ByteTokenizer()
    return data


def _configured(
    source: str, overrides: list[str], own_data: Optional[str], *, own_tokenizer: bool
) -> "SampleDataModule":
    """The data module of a recipe, or a data module by name."""
    import fiddle as fdl
    import lightning.pytorch as pl

    from nemo2 import recipes  # announces the factories of data
    from nemo2.config.factories import factory_names, made_by_name
    from nemo2.config.typed_text import WrongType
    from nemo2.config.values import typed
    from nemo2.data.finetuning.base import SampleDataModule

    try:
        config = made_by_name(source, (pl.LightningDataModule,), fit=typed)
        if changes := [*overrides, *([f"--data {own_data}"] if own_data else [])]:
            raise ConfigError(f"{changes[0]}: write the settings of a data set in brackets: {source}(seq_length=512).")
        tokenizer = None
    except WrongType:
        known = [*factory_names((pl.LightningDataModule,)), *recipes.names(), *recipes.own()[0]]
        if source.isidentifier() and source not in known:
            raise ConfigError(
                f"{source}: there is no file, folder, data set or recipe of this name{did_you_mean(source, known)}"
            ) from None
        recipe = configured(source, overrides, data=own_data)
        config, tokenizer = recipe.data, getattr(recipe, "tokenizer", None)
    data: Any = fdl.build(config)
    if not isinstance(data, SampleDataModule):
        raise ConfigError(
            f"{source}: its data is a {type(data).__name__}, which has no loss masks; a preview is of "
            "fine-tuning data only."
        )
    if data.tokenizer is None and isinstance(tokenizer, fdl.Buildable):
        data.tokenizer = fdl.build(tokenizer)
    elif data.tokenizer is None and tokenizer == "model" and not own_tokenizer:
        raise ConfigError(
            f"{source} has tokenizer='model': it trains with the tokenizer of the checkpoint that it starts from. Pass "
            "--tokenizer PATH, such as context/tokenizer of the checkpoint."
        )
    return data
