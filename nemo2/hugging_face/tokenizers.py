# SPDX-License-Identifier: Apache-2.0
"""Copies tokenizers between Hugging Face's folders and nemo2's checkpoints. The files are copied byte for byte,
including the chat template and ``generation_config.json``. Code in a folder never runs."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any, Optional

from nemo2.checkpoint.auto_resume import RestoreConfig
from nemo2.checkpoint.context import give_tokenizer, load_context, refuse_another_tokenizer, take_tokenizer
from nemo2.checkpoint.places import HUGGING_FACE
from nemo2.data.tokenizer import AutoTokenizer, BPETokenizer, GPT2BPETokenizer
from nemo2.data.tokenizer_files import files_of, tokenizer_files
from nemo2.errors import CheckpointError, ConfigError, DataError
from nemo2.hugging_face.restore import folder_of
from nemo2.hugging_face.safetensors_files import CONFIG, refuse_outside

_log = logging.getLogger(__name__)
_GENERATION = "generation_config.json"
_TOKENIZER, _SETTINGS = "tokenizer.json", "tokenizer_config.json"


def tokenizer_in(folder: Path) -> Optional[AutoTokenizer]:
    """The tokenizer in a Hugging Face folder. None, with a message: the folder has no tokenizer that works without its
    own code.

    Raises:
        ConfigError: transformers isn't installed.
        SecurityError: one of its files leads out of the folder.
    """
    names = [file.relative_to(folder).as_posix() for file in tokenizer_files(folder)]
    if not names:
        _log.warning("%s contains no tokenizer. A run from these weights must set its own tokenizer.", folder)
        return None
    for name in names:
        refuse_outside(folder, name)
    tokenizer = AutoTokenizer(str(folder), local_files_only=True)
    try:
        tokenizer.vocab_size  # noqa: B018  (reads the files)
    except DataError as error:
        _log.warning(
            "The tokenizer in %s is not copied, because nemo2 runs no code of a folder. A run from these weights must "
            "set its own tokenizer. (%s)",
            folder,
            error,
        )
        return None
    return tokenizer


def take_released_tokenizer(
    restore: Optional[RestoreConfig], model: Any, data: Any = None, *, resumed_from: Optional[Path] = None
) -> None:
    """Give ``model`` the tokenizer of the released weights that ``restore`` names, and also ``data`` if both have the
    same tokenizer. Does nothing if ``restore`` names no released weights, or with ``load_artifacts=False``.

    Args:
        resumed_from: The checkpoint that the run resumes from. If the release can't be read any more, the tokenizer is
            that of this checkpoint. None: the run starts from the released weights.

    Raises:
        CheckpointError, ConfigError, SecurityError: see `folder_of` and `tokenizer_in`.
    """
    if restore is None or not restore.path.startswith(HUGGING_FACE) or not restore.load_artifacts:
        return
    try:
        folder = folder_of(restore.path)
    except (CheckpointError, ConfigError):
        if resumed_from is None:
            raise
        take_tokenizer(resumed_from, model, data)
        return
    if (theirs := tokenizer_in(folder)) is not None:
        give_tokenizer(theirs, folder, model, data)


def put_tokenizer(source: Any, folder: Path) -> Optional[str]:
    """Write a tokenizer's files into ``folder`` in the format of transformers. Returns the reason if there is no
    tokenizer.

    Args:
        source: A nemo2 tokenizer, or a nemo2 checkpoint that describes one.

    Raises:
        CheckpointError: the tokenizer differs from that of the checkpoint's training.
    """
    try:
        tokenizer = load_context(source, "tokenizer") if isinstance(source, Path) else source
    except CheckpointError as error:
        return str(error)
    if isinstance(source, Path):
        refuse_another_tokenizer(source, tokenizer)
    files = files_of(tokenizer)
    if not files and isinstance(tokenizer, AutoTokenizer):
        try:
            cached = folder_of(f"{HUGGING_FACE}{tokenizer.pretrained_model_name}", local_files_only=True)
        except (CheckpointError, ConfigError) as error:
            return str(error)
        files = {file.relative_to(cached).as_posix(): file for file in tokenizer_files(cached)}
    if not files:
        return f"{tokenizer!r} has no Hugging Face form"
    if isinstance(tokenizer, GPT2BPETokenizer):
        tokenizer._tokenizer.save(str(folder / _TOKENIZER))
    if list(files) == [Path(str(getattr(tokenizer, "path", ""))).name]:
        files = {_TOKENIZER: next(iter(files.values()))}
    for name, file in files.items():
        if name == CONFIG:  # the model's, which the export writes itself
            continue
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / name)
    _complete(tokenizer, folder)
    return None


def _complete(tokenizer: Any, folder: Path) -> None:
    """Add the files that transformers needs for nemo2's own tokenizer: its class, and the token that ends a text."""
    if not isinstance(tokenizer, BPETokenizer):
        return
    tokens = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id, "pad_token": tokenizer.pad_id}
    known = {name: token_id for name, token_id in tokens.items() if token_id is not None}
    if not (folder / _SETTINGS).exists():
        named = {name: tokenizer._tokenizer.id_to_token(token_id) for name, token_id in known.items()}
        _write(folder / _SETTINGS, {"tokenizer_class": "PreTrainedTokenizerFast", **named})
    if not (folder / _GENERATION).exists():
        _write(folder / _GENERATION, {f"{name}_id": token_id for name, token_id in known.items()})


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
