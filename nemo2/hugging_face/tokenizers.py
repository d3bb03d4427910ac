# SPDX-License-Identifier: Apache-2.0
"""Writes tokenizers into Hugging Face's folders. The files are copied byte for byte, including the chat template and
``generation_config.json``. Only special tokens that were set on the tokenizer replace those in its files."""

import json
import shutil
from pathlib import Path
from typing import Any, Optional

from nemo2.base.errors import CheckpointError, ConfigError
from nemo2.checkpoint.context import load_context
from nemo2.checkpoint.paths import HUGGING_FACE, folder_of
from nemo2.checkpoint.tokenizers import refuse_another_tokenizer
from nemo2.data.tokenizer import AutoTokenizer, BPETokenizer, GPT2BPETokenizer
from nemo2.data.tokenizer_files import GENERATION, files_of, tokenizer_files
from nemo2.hugging_face.safetensors_files import CONFIG, write_json

_TOKENIZER, _SETTINGS, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_MAP = "special_tokens_map.json"
_SPECIAL = ("bos_token", "eos_token", "pad_token")


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
        tokenizer.backend.save(str(folder / _TOKENIZER))
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
    """Add what the tokenizer's files lack: the template that the model was trained with, the special tokens that were set on
    the tokenizer, and for a ``tokenizer.json`` alone its class and the token that ends a text."""
    if template := getattr(tokenizer, "chat_template", None):
        (folder / _TEMPLATE).write_text(template, "utf-8")
    if not isinstance(tokenizer, (AutoTokenizer, BPETokenizer)):
        return
    changed = {name: token for name in _SPECIAL if (token := getattr(tokenizer, name)) is not None}
    alone = isinstance(tokenizer, BPETokenizer)
    if not changed and not alone:
        return
    tokens = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id, "pad_token": tokenizer.pad_id}
    token_ids = {name: token_id for name, token_id in tokens.items() if token_id is not None}
    if alone and not (folder / _SETTINGS).exists():
        named = {name: tokenizer.backend.id_to_token(token_id) for name, token_id in token_ids.items()}
        write_json(folder / _SETTINGS, {"tokenizer_class": "PreTrainedTokenizerFast", **named})
    if changed:
        write_json(folder / _SETTINGS, {**_read(folder / _SETTINGS), **changed})
        if (folder / _MAP).exists():  # transformers 4 prefers it to the settings of older files
            write_json(folder / _MAP, {**_read(folder / _MAP), **changed})
    stored = _read(folder / GENERATION)
    ids: dict[str, Any] = {
        f"{name}_id": token_id for name, token_id in token_ids.items() if name in changed or not stored
    }
    ends = stored.get("eos_token_id")
    if isinstance(ends, list) and "eos_token_id" in ids:  # a chat model's turns may end otherwise than its texts
        ids["eos_token_id"] = [*ends, *{ids["eos_token_id"]}.difference(ends)]
    if ids:
        write_json(folder / GENERATION, {**stored, **ids})


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8")) if path.exists() else {}
