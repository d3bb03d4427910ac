# SPDX-License-Identifier: Apache-2.0
"""``--data PATH``: gives a recipe the user's data and keeps the recipe's sequence length and batch sizes."""

from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from nemo2.base.errors import ConfigError
from nemo2.data.documents import first_record, holds_records
from nemo2.data.token_files import strip_suffix

Data = Annotated[
    Optional[str],
    typer.Option(
        "--data",
        help="Your data. Pre-training: the prefix of token files from `nemo2 data prepare`. Fine-tuning: a file or directory of "
        "samples.",
    ),
]


def refuse_data(word: str, place: str) -> None:
    """Raise ConfigError if a word that is no ``place`` ("recipe") is a file or folder, or ends as files with data do.

    A Python file is a recipe, and never data: what is wrong with it is for the reader of recipes to say.
    """
    path = Path(word).expanduser()
    if (path.is_file() and path.suffix != ".py") or (path.is_dir() and any(map(holds_records, path.iterdir()))):
        raise ConfigError(f"{word} is no {place}. If it is your data, write --data {word}.")
    if holds_records(path):
        raise ConfigError(f"{word} is no {place}, and there is no such file. Data are named with --data FILE.")


def give_data(recipe: Any, path: str) -> None:
    """Make ``recipe`` train on the data at ``path``.

    For token files with a tokenizer of `nemo2 data prepare --train-bpe` beside them, the recipe gets that tokenizer.
    Otherwise its tokenizer stays.

    Raises:
        ConfigError: there is no data at ``path``.
    """
    from nemo2.config.located import recorded_at
    from nemo2.config.overrides import carry_over

    with recorded_at(f"--data {path}", 1):
        if recipe.__fn_or_cls__.__name__ == "finetune":
            data = _samples(path)
        else:
            data = _tokens(path)
        carry_over(recipe.data, data)
        recipe.data = data


def _tokens(path: str) -> Any:
    from nemo2.config import Config
    from nemo2.data.finetuning.dialects import has_messages
    from nemo2.data.pretraining import PreTrainingDataModule
    from nemo2.data.tokenizer import BPETokenizer

    prefix = strip_suffix(path)
    if not Path(f"{prefix}.bin").expanduser().is_file():
        if has_messages(first_record(Path(path).expanduser())):
            raise ConfigError(
                f"--data {path}: these are chats, which are for `nemo2 finetune`. Pre-training takes the prefix of token files."
            )
        text, output = (path, Path(path).with_suffix("")) if Path(path).expanduser().exists() else ("TEXT", prefix)
        raise ConfigError(
            f"--data {path}: there is no {prefix}.bin. `nemo2 data prepare {text} --output {output} --train-bpe 8192` makes "
            "token files and a tokenizer from text."
        )
    data = Config(PreTrainingDataModule, paths=prefix)
    if Path(f"{prefix}_tokenizer.json").expanduser().is_file():
        data.tokenizer = Config(BPETokenizer, path=f"{prefix}_tokenizer.json")
    return data


def _samples(path: str) -> Any:
    from nemo2.config import Config
    from nemo2.data.finetuning.hf_dataset import HFDatasetDataModule

    if Path(f"{strip_suffix(path)}.bin").expanduser().is_file():
        raise ConfigError(
            f"--data {path}: these are tokens, which are for `nemo2 pretrain`. Fine-tuning takes a file or directory of samples."
        )
    if not Path(path).expanduser().exists():
        raise ConfigError(f"--data {path}: there is no such file or directory.")
    return Config(HFDatasetDataModule, path_or_dataset=path)
