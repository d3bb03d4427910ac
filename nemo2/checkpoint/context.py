# SPDX-License-Identifier: Apache-2.0
"""``context/``: what rebuilds model, tokenizer and data of a checkpoint without the script that trained it.

One JSON file per part, in the format of recipes: no pickle, and reading constructs only what an allow-list names. Files
that a tokenizer needs travel along in ``context/tokenizer``.
"""

import json
from pathlib import Path
from typing import Any, Literal

from nemo2.checkpoint.directory import CONTEXT_PATH
from nemo2.errors import CheckpointError

Part = Literal["model", "tokenizer", "data", "optim"]
TOKENIZER_FILES = "tokenizer"


def write_context(checkpoint: Path, trainer: Any) -> None:
    """Write ``checkpoint/context`` for a trainer's model, tokenizer, data and optimizer. One process calls it.

    A part that can't be described (a module of the user's own that isn't `configurable`) is listed in ``missing.json``
    with the reason, so that nobody looks for it in vain.
    """
    from nemo2.config.serialize import to_json

    directory = checkpoint / CONTEXT_PATH
    directory.mkdir(parents=True, exist_ok=True)
    missing: dict[str, str] = {}
    for part, obj in _parts(trainer).items():
        if obj is None:
            missing[part] = "the run had none"
            continue
        try:
            if part == "tokenizer":
                obj = _with_files(obj, directory / TOKENIZER_FILES)
            text = to_json(_as_config(obj), indent=1)
        except Exception as error:  # whatever a user's class raises: a checkpoint without context beats none
            missing[part] = str(error).splitlines()[0]
            continue
        (directory / f"{part}.json").write_text(text + "\n")
    (directory / "missing.json").write_text(json.dumps(missing, indent=1) + "\n")


def load_context(checkpoint: Path | str, part: Part = "model", *, build: bool = True, allowed_modules: Any = ()) -> Any:
    """A part of a checkpoint's context, built; with ``build=False`` as an editable config.

    Args:
        checkpoint: The checkpoint directory, or its ``context``.
        part: Which.
        allowed_modules: Modules beside nemo2's own and Megatron-Core's whose classes may be constructed.

    Raises:
        CheckpointError: the context or the part isn't there.
        SecurityError: it names something outside the allow-list.
    """
    import fiddle

    from nemo2.config.serialize import from_json

    directory = Path(checkpoint)
    if directory.name != CONTEXT_PATH:
        directory = directory / CONTEXT_PATH
    file = directory / f"{part}.json"
    if not file.is_file():
        raise CheckpointError(f"{directory} doesn't describe the {part}{_why_missing(directory, part)}.")
    config = from_json(file.read_text(), allowed_modules=allowed_modules)
    if part == "tokenizer":
        _point_at_files(config, directory / TOKENIZER_FILES)
    return fiddle.build(config) if build else config


def _parts(trainer: Any) -> dict[str, Any]:
    module, data = trainer.lightning_module, trainer.datamodule
    tokenizer = getattr(module, "tokenizer", None) or getattr(data, "tokenizer", None)
    return {"model": module, "tokenizer": tokenizer, "data": data, "optim": getattr(module, "optim", None)}


def _as_config(obj: Any) -> Any:
    from nemo2.config.tree import as_config

    config = as_config(obj)
    if type(obj).__mro__ and hasattr(config, "__arguments__"):
        # The model's optimizer and tokenizer are parts of their own.
        for name in ("optim", "tokenizer"):
            config.__arguments__.pop(name, None)
    return config


def _with_files(tokenizer: Any, directory: Path) -> Any:
    """The tokenizer, its files copied into ``directory`` where it can do that."""
    save = getattr(tokenizer, "save_files", None)
    if save is not None:
        directory.mkdir(exist_ok=True)
        save(directory)
    return tokenizer


def _point_at_files(config: Any, directory: Path) -> None:
    """A tokenizer whose files travelled along reads those."""
    path = getattr(config, "path", None)
    if path is not None and (directory / Path(str(path)).name).is_file():
        config.path = str(directory / Path(str(path)).name)


def _why_missing(directory: Path, part: str) -> str:
    try:
        reason = json.loads((directory / "missing.json").read_text()).get(part)
    except (OSError, ValueError):
        return ": there is no such file"
    return f": {reason}" if reason else ""
