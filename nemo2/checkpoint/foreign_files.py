# SPDX-License-Identifier: Apache-2.0
"""Files of a checkpoint from elsewhere: those in its own folder, JSON and YAML of a bearable size, depth and number of values.

YAML's aliases let a file of a few lines stand for more values than there are atoms; a deep one ends any recursive reader. Both
are measured on the way, before anything is made of them.
"""

import os
import stat
from pathlib import Path
from typing import Any, Optional

from nemo2.errors import CheckpointError, SecurityError
from nemo2.files import parse_json, read_bounded

MOST_BYTES = 16 << 20
MOST_VALUES = 200_000
MOST_DEPTH = 100
"""NeMo's largest ``model.yaml`` has some thousand values, ten deep."""


def read_json(path: Path, *, at_most: int = MOST_BYTES) -> Any:
    """The value of a JSON file.

    Raises:
        CheckpointError: it isn't there, or is no JSON, or is too large or too deep.
    """
    try:
        return parse_json(_read(path, at_most).decode())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {_told(error)}.") from error


def read_yaml(path: Path, *, at_most: int = MOST_BYTES) -> Any:
    """The value of a YAML file of plain data; no tag of it is looked up.

    Raises:
        CheckpointError: it isn't there, or is no YAML of plain data, or is larger or deeper than the limits above.
    """
    import yaml

    content = _read(path, at_most)
    try:
        _measure(content.decode(), path)
        return yaml.safe_load(content)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not YAML with plain data: {_told(error)}.") from error


def nemo_adapters(checkpoint: Path) -> Optional[str]:
    """The reason why nemo2 can't read a NeMo 2.0 checkpoint that contains only adapters, and the way to convert it. None: any
    other folder."""
    file = checkpoint / "weights" / "adapter_metadata.json"
    if not file.is_file():
        return None
    told = read_json(file)
    base = told.get("model_ckpt_path") if isinstance(told, dict) else None
    over = f" over the weights of {base}" if isinstance(base, str) else ""
    return (
        f"it contains only the adapters of a PEFT fine-tuning{over}. nemo2 reads adapters of Hugging Face's peft and "
        "its own adapters. On a machine with NeMo, merge the adapters with "
        f"llm.peft.merge_lora({str(checkpoint)!r}, OUTPUT) and use OUTPUT, or export them with "
        "llm.export_ckpt(..., target='hf-peft') and run `nemo2 import` on the result."
    )


def refuse_links(checkpoint: Path) -> None:
    """Raise where something in the folder is neither a regular file nor a folder: reading it would lead out, or never end.

    Raises:
        SecurityError: naming it.
    """
    for folder, folders, files in os.walk(checkpoint):
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            mode = os.lstat(path).st_mode
            if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
                continue
            what = f"a link to {os.readlink(path)}" if stat.S_ISLNK(mode) else "neither a file nor a folder"
            raise SecurityError(
                f"{path} is {what}, but nemo2 reads a checkpoint from its own folder only. If you put it there, "
                "replace it with the file itself."
            )


def _measure(text: str, path: Path) -> None:
    """Count values and depth along YAML's events, an alias for as many values as it stands for.

    Raises:
        CheckpointError: too many, or too deep.
    """
    import yaml

    open_counts: list[tuple[str | None, int]] = []
    anchored: dict[str, int] = {}
    total = 0
    # The reader in C, where there is one, is some ten times as fast.
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        values = 0
        if isinstance(event, yaml.AliasEvent):
            # An alias inside its own anchor has no end.
            values = anchored.get(event.anchor, MOST_VALUES + 1)
        elif isinstance(event, yaml.ScalarEvent):
            values = 1
            if event.anchor:
                anchored[event.anchor] = 1
        elif isinstance(event, yaml.CollectionStartEvent):
            values = 1
            open_counts.append((event.anchor, total))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_counts.pop()
            if anchor:
                anchored[anchor] = total - before
        total += values
        if total > MOST_VALUES:
            raise CheckpointError(
                f"{path} contains more than {MOST_VALUES} values, counting each alias as often as it is used."
            )
        if len(open_counts) > MOST_DEPTH:
            raise CheckpointError(f"{path} is more than {MOST_DEPTH} levels deep.")


def _read(path: Path, at_most: int) -> bytes:
    try:
        return read_bounded(path, at_most=at_most)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or f'it {error}'}.") from error


def _told(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return " ".join(str(error).split()).rstrip(".")[:300]
