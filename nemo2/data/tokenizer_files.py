# SPDX-License-Identifier: Apache-2.0
"""Lists the tokenizer's files in a folder, so that a checkpoint can store them and an export can restore them
unchanged."""

from pathlib import Path

from nemo2.base.errors import DataError
from nemo2.base.files import parse_json, text_of

GENERATION = "generation_config.json"
BESIDE = (GENERATION, "config.json")
"""Files of a model that are no tokenizer by themselves."""
PATTERNS = (
    "tokenizer*.json",  # and tokenizer_config.json
    "tokenizer*.model",
    "*.tiktoken",
    "tiktoken.model",
    "spiece.model",
    "sentencepiece*.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "normalizer.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.*",
    "additional_chat_templates/*.jinja",
    GENERATION,  # its end tokens are ids of this tokenizer
    "config.json",  # transformers chooses a tokenizer's class by its kind of model
)
"""The names in transformers. Python files, which some repositories contain, are not included."""
FIELDS = ("path", "pretrained_model_name", "model_path", "vocab_file", "merges_file")
"""Arguments of nemo2's tokenizers that may name a file or a folder."""


def tokenizer_files(source: Path) -> list[Path]:
    """The files of the tokenizer ``source``, or of the tokenizer in the folder ``source``. Empty: there is no
    tokenizer."""
    if source.is_file():
        return [source]
    files = {file for pattern in PATTERNS for file in source.glob(pattern) if file.is_file()}
    return sorted(files) if any(file.name not in BESIDE for file in files) else []


def files_of(tokenizer: object) -> dict[str, Path]:
    """The files that a nemo2 tokenizer reads, by their names in a common folder. A tokenizer that is a name on the
    hub has none."""
    files: dict[str, Path] = {}
    for field in FIELDS:
        value = getattr(tokenizer, field, None)
        if value is not None:
            source = Path(str(value)).expanduser()
            folder = source if source.is_dir() else source.parent
            files |= {file.relative_to(folder).as_posix(): file for file in tokenizer_files(source)}
    return files


def end_ids_of(tokenizer: object) -> set[int]:
    """The tokens that end a text: the tokenizer's ``eos_id``, and those of the ``generation_config.json`` in its folder,
    as in transformers' ``generate``. Empty: no token does.

    Raises:
        DataError: the file isn't a JSON object, or its ``eos_token_id`` isn't an id or a list of ids.
    """
    ids = [getattr(tokenizer, "eos_id", None)]
    if (file := files_of(tokenizer).get(GENERATION)) is not None:
        try:
            ends = parse_json(text_of(file)).get("eos_token_id")
        except (ValueError, RecursionError, AttributeError) as error:
            raise DataError(f"{file} is not a JSON object: {error}.") from error
        ids += ends if isinstance(ends, list) else [ends]
        if not all(one is None or type(one) is int for one in ids):
            raise DataError(f"{file}: eos_token_id={ends!r} must be a token's id or a list of ids.")
    return {one for one in ids if one is not None}
