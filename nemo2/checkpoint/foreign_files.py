# SPDX-License-Identifier: Apache-2.0
"""Reads files of untrusted checkpoints: only files in their own folder, and JSON and YAML of limited size, depth and
number of values.

With YAML's aliases, a file of a few lines can stand for an astronomical number of values, and a deep file crashes any
recursive reader. Both are measured before any value is created.
"""

import os
import stat
from pathlib import Path
from typing import Any, Optional

from nemo2.base.errors import CheckpointError, SecurityError
from nemo2.base.files import parse_json, read_bounded, why_not_inside

MOST_BYTES = 16 << 20
MOST_VALUES = 200_000
MOST_DEPTH = 100
"""The limits. NeMo's largest ``model.yaml`` has some thousand values at a depth of ten."""

NEMO_STATE = (
    "{path} is a checkpoint of NeMo 2.0, and nemo2 reads its weights, not its optimizer state. Start a new run from the "
    "weights: resume.restore_config.path={path}, with load_optim_state=False and without resume.resume_from_path."
)
"""The error of a run that would read more than the weights of a NeMo 2.0 checkpoint, with ``path``."""


def read_json(path: Path, *, at_most: int = MOST_BYTES) -> Any:
    """The value of a JSON file.

    Raises:
        CheckpointError: the file is missing, isn't JSON, or is too large or too deep.
    """
    try:
        return parse_json(_read(path, at_most).decode())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {_shortened(error)}.") from error


def read_object(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object in the file ``name`` of a foreign ``folder``.

    Raises:
        CheckpointError: as `read_json`, or it is no object.
        SecurityError: the file leads out of the folder.
    """
    refuse_outside(folder, name)
    value = read_json(folder / name)
    if not isinstance(value, dict):
        raise CheckpointError(f"{folder / name} isn't a JSON object, but {type(value).__name__}.")
    return value


def read_yaml(path: Path, *, at_most: int = MOST_BYTES) -> Any:
    """The value of a YAML file of plain data. No tag is resolved.

    Raises:
        CheckpointError: the file is missing, isn't YAML of plain data, or exceeds the limits above.
    """
    import yaml

    content = _read(path, at_most)
    try:
        _measure(content.decode(), path)
        return yaml.safe_load(content)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not YAML with plain data: {_shortened(error)}.") from error


def nemo_adapters(checkpoint: Path) -> Optional[str]:
    """The reason why nemo2 can't read a NeMo 2.0 checkpoint that contains only adapters, and the way to convert it. None: any
    other folder."""
    file = checkpoint / "weights" / "adapter_metadata.json"
    if not file.is_file():
        return None
    metadata = read_json(file)
    base = metadata.get("model_ckpt_path") if isinstance(metadata, dict) else None
    over = f" over the weights of {base}" if isinstance(base, str) else ""
    return (
        f"it contains only the adapters of a PEFT fine-tuning{over}. nemo2 reads adapters of Hugging Face's peft and "
        "its own adapters. On a machine with NeMo, merge the adapters with "
        f"llm.peft.merge_lora({str(checkpoint)!r}, OUTPUT) and use OUTPUT, or export them with "
        "llm.export_ckpt(..., target='hf-peft') and run `nemo2 import` on the result."
    )


def is_nemo(checkpoint: Path) -> bool:
    """Whether NeMo 2.0 wrote the checkpoint, judging by its ``context/``."""
    return any((checkpoint / "context" / name).is_file() for name in ("io.json", "model.yaml"))


def refuse_links(checkpoint: Path) -> None:
    """Refuse a folder that contains anything except regular files and folders. Reading a link would lead out of the
    folder, and reading a pipe might never end.

    Raises:
        SecurityError: the folder has such an entry. The message names it.
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


def refuse_outside(folder: Path, name: str) -> None:
    """Refuse a ``name`` that leads out of its folder. It may lead into the blobs of a Hugging Face cache.

    Raises:
        SecurityError: the name leads out of the folder.
    """
    if why := why_not_inside(folder, name, links_into=_blobs(folder)):
        raise SecurityError(f"{folder}: {name} {why}, but nemo2 reads weights from their own folder only.")


def _measure(text: str, path: Path) -> None:
    """Count values and depth from YAML's events. An alias counts as all the values that it stands for.

    Raises:
        CheckpointError: there are too many values, or they are too deep.
    """
    import yaml

    open_counts: list[tuple[str | None, int]] = []
    anchored: dict[str, int] = {}
    total = 0
    # The C reader, if installed, is about ten times as fast.
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        values = 0
        if isinstance(event, yaml.AliasEvent):
            # An alias inside its own anchor is endless.
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


def _shortened(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return " ".join(str(error).split()).rstrip(".")[:300]


def _blobs(folder: Path) -> Path | None:
    """The folder of blobs that files of a snapshot in Hugging Face's cache link to. None: ``folder`` is no snapshot."""
    where = Path(os.path.abspath(folder))
    return (where.parent.parent / "blobs").resolve() if where.parent.name == "snapshots" else None
