# SPDX-License-Identifier: Apache-2.0
"""Lists the tokenizer's files in a folder, so that a checkpoint can store them and an export can restore them
unchanged."""

from pathlib import Path

BESIDE = ("generation_config.json", "config.json")
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
    "generation_config.json",  # its end tokens are ids of this tokenizer
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
