# SPDX-License-Identifier: Apache-2.0
"""``context/``: rebuilds the model, tokenizer and data of a checkpoint without the script that trained it.

It has one JSON file per part, in the format of recipes, without pickles. Reading constructs only classes on an
allow-list. ``context/tokenizer`` holds copies of the tokenizer's files. ``context/release.json`` is the config.json of the
released weights that training began with, of which nemo2's configuration has a part.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, Optional

from nemo2.base.backend.compilation import as_megatron_has_it
from nemo2.base.errors import CheckpointError, ConfigError, SecurityError
from nemo2.base.files import read_bounded
from nemo2.checkpoint.directory import CONTEXT_PATH, comparing, is_loaded, read_manifest
from nemo2.checkpoint.foreign_files import MOST_BYTES, read_json, read_object, refuse_links
from nemo2.checkpoint.paths import HUGGING_FACE, checkpoint_at, folder_of
from nemo2.config.aliases import parameter_names
from nemo2.config.capture import captured_arguments, edited_arguments
from nemo2.config.provenance import adjustments
from nemo2.config.requested import explicit_fields
from nemo2.data.base import MegatronDataModule
from nemo2.data.tokenizer_files import FIELDS, files_of
from nemo2.mcore.parallel.layout import ParallelismConfig
from nemo2.mcore.precision import DtypeConfig

_log = logging.getLogger(__name__)

Part = Literal["model", "tokenizer", "data", "optim"]
TOKENIZER_FILES = "tokenizer"
RELEASE = "release.json"
INPUTS = "inputs"
MANAGED = {field.name for managed in (ParallelismConfig, DtypeConfig) for field in dataclasses.fields(managed)}
"""Fields of a model's configuration that the strategy and the precision plugin write."""
_OF_WEIGHTS = {"seq_length", "moe_grouped_gemm"}
"""Fields that nemo2 adjusts and that decide the shapes of weights: of learned positions, and of experts with adapters."""


def write_context(checkpoint: Path, trainer: Any, *, release: Optional[Mapping[str, Any]] = None) -> None:
    """Write ``checkpoint/context`` for a trainer's model, tokenizer, data and optimizer. One process calls it.

    ``release`` is as in `write_parts`.
    """
    write_parts(checkpoint, _parts(trainer), release=release)


def write_parts(checkpoint: Path, parts: Mapping[Part, Any], *, release: Optional[Mapping[str, Any]] = None) -> None:
    """Write ``checkpoint/context`` with these parts, and with ``release``, the config.json of the release that the weights come
    from. None: they come from no release, or it is unknown.

    A part that can't be described (a user's module that isn't `configurable`) and a part of None are listed in
    ``missing.json`` with the reason.
    """
    from nemo2.config.serialize import to_json

    directory = checkpoint / CONTEXT_PATH
    directory.mkdir(parents=True, exist_ok=True)
    missing: dict[str, str] = {}
    for part, obj in parts.items():
        if obj is None:
            missing[part] = "the run had none"
            continue
        try:
            for name, file in files_of(obj).items() if part == "tokenizer" else ():  # the checkpoint may move
                (copied := directory / TOKENIZER_FILES / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file, copied)
            # The model's optimizer and tokenizer are separate parts.
            text = to_json(described(obj, without=("optim", "tokenizer")), indent=1)
        except Exception as error:  # any error of a user's class: a save without context is better than none
            missing[part] = " ".join(str(error).split())
            continue
        (directory / f"{part}.json").write_text(text + "\n")
    (directory / "missing.json").write_text(json.dumps(missing, indent=1) + "\n")
    if release is not None:
        (directory / RELEASE).write_text(json.dumps(release, indent=1) + "\n")


def load_release(checkpoint: Path) -> Optional[dict[str, Any]]:
    """The config.json of the release that a checkpoint's weights come from. None: the checkpoint has none.

    Raises:
        CheckpointError: the file isn't a JSON object, or differs from what was written.
        SecurityError: it leads out of its folder.
    """
    directory = checkpoint / CONTEXT_PATH
    if not (directory / RELEASE).is_file():
        return None
    refuse_links(directory)
    _refuse_changed(directory)
    return read_object(directory, RELEASE)


@functools.cache
def release_of(path: str) -> Optional[dict[str, Any]]:
    """The config.json of the release at ``path``, or of that from which the weights of a checkpoint at ``path`` come. None:
    unknown. Read once, because the base of a run doesn't change."""
    try:
        if path.startswith(HUGGING_FACE):
            return read_object(folder_of(path, local_files_only=True), "config.json")
        return load_release(checkpoint_at(path))
    except (CheckpointError, ConfigError, SecurityError, OSError) as error:
        _log.warning("An export of this run won't have the settings of its release that nemo2 doesn't use: %s", error)
        return None


def load_context(checkpoint: Path | str, part: Part = "model", *, build: bool = True, allowed_modules: Any = ()) -> Any:
    """Build a part of a checkpoint's context. With ``build=False``: the part as an editable config.

    Args:
        checkpoint: The checkpoint directory, or its ``context``.
        part: The part's name, such as "model" or "data".
        allowed_modules: Modules beside nemo2's own and Megatron-Core's whose classes may be constructed.

    Raises:
        CheckpointError: the context or the part is missing, or differs from what was written.
        SecurityError: the part names something outside the allow-list, or leads out of its folder.
    """
    import fiddle

    from nemo2.config.reading import from_json

    directory = Path(checkpoint)
    if directory.name != CONTEXT_PATH:
        directory = directory / CONTEXT_PATH
    file = directory / f"{part}.json"
    if not file.is_file():
        raise CheckpointError(f"{directory} does not describe the {part}{why_missing(directory, part)}.")
    try:
        refuse_links(directory)
        _refuse_changed(directory)
        config = from_json(read_bounded(file, at_most=MOST_BYTES), allowed_modules=allowed_modules)
    except (OSError, ConfigError) as error:
        raise CheckpointError(f"{file} does not describe the {part}: {error}") from error
    copies = directory / TOKENIZER_FILES
    if part == "tokenizer" and copies.is_dir():
        for field in FIELDS:
            if (value := getattr(config, field, None)) is not None:
                copied = copies / Path(str(value)).name
                setattr(config, field, str(copied if copied.is_file() else copies))
    pattern = getattr(getattr(config, "config", None), "hybrid_override_pattern", None) if part == "model" else None
    if isinstance(pattern, str) and "|" in pattern:
        from nemo2.models.hybrid_pattern import without_stages

        # Whoever reads the model has a layout of their own.
        config.config.hybrid_override_pattern = without_stages(pattern)
    return fiddle.build(config) if build else config


def describes(checkpoint: Path, part: Part) -> bool:
    """Whether a checkpoint's context has this part. An imported checkpoint has no data, and parts that can't be
    described are missing."""
    return (checkpoint / CONTEXT_PATH / f"{part}.json").is_file()


def described_parts(trainer: Any) -> dict[Part, Any]:
    """The configs that `write_context` would write for ``trainer``, by part, without those that can't be described."""
    parts: dict[Part, Any] = {}
    for part, obj in _parts(trainer).items():
        if obj is not None:
            with contextlib.suppress(Exception):  # any error of a user's class
                parts[part] = described(obj, without=("optim", "tokenizer"))
    return parts


def settings_of(trainer: Any) -> dict[str, Any]:
    """Facts of a run that ``context/`` doesn't contain, as plain JSON for the manifest."""
    module, data = trainer.lightning_module, getattr(trainer, "datamodule", None)
    tokenizer = getattr(module, "tokenizer", None) or getattr(data, "tokenizer", None)
    return {
        "precision": str(getattr(trainer.strategy.precision_plugin, "precision", "")),
        "seed": os.environ.get("PL_GLOBAL_SEED"),
        **tokenizer_settings(tokenizer),
        "max_steps": trainer.max_steps,
    }


def inputs_of(trainer: Any) -> dict[str, Any]:
    """The records of the run's data files for the manifest, which rank 0 writes. Empty on other ranks."""
    data = getattr(trainer, "datamodule", None)
    if not isinstance(data, MegatronDataModule) or not trainer.is_global_zero:
        return {}
    return {INPUTS: {item.path: item.record() for item in data.inputs()}}


def tokenizer_settings(tokenizer: Any) -> dict[str, Any]:
    """The facts of `settings_of` about the tokenizer."""
    return {
        "tokenizer_vocab_size": getattr(tokenizer, "vocab_size", None),
        "tokenizer_identity": tokenizer_identity(tokenizer),
    }


def tokenizer_identity(tokenizer: Any) -> dict[str, str]:
    """Plain data that distinguishes a tokenizer's ids from those of other tokenizers. Empty: unknown.

    It contains neither the path of the tokenizer's files nor its end-of-text token, which releases have changed.
    """
    try:
        return {name: str(value) for name, value in tokenizer.unique_identifiers.items() if name not in ("name", "eod")}
    except Exception:  # no tokenizer, missing files, or any error of a user's class
        return {}


def _parts(trainer: Any) -> dict[Part, Any]:
    module, data = trainer.lightning_module, trainer.datamodule
    tokenizer = getattr(module, "tokenizer", None) or getattr(data, "tokenizer", None)
    tokenizer = _with_chat_template(tokenizer, getattr(data, "chat_template", None))
    return {"model": module, "tokenizer": tokenizer, "data": data, "optim": getattr(module, "optim", None)}


def _with_chat_template(tokenizer: Any, template: Optional[str]) -> Any:
    """The tokenizer with the template that the model is trained with, so that it travels with the weights. None: its own."""
    arguments = captured_arguments(tokenizer)
    if template is None or arguments is None or "chat_template" not in parameter_names(type(tokenizer)):
        return tokenizer
    return type(tokenizer)(**arguments | {"chat_template": template})


def described(obj: Any, *, without: Collection[str] = ()) -> Any:
    """``obj`` as a config of its original arguments plus the user's later changes.

    Values that the strategy, the precision and the backend wrote describe the layout of this run, not the model. They
    are left out, so that the model can be built under any layout.
    """
    from nemo2.config.tree import Config

    if isinstance(obj, list | tuple):
        return type(obj)(described(item) for item in obj)
    if isinstance(obj, dict):
        return {key: described(value) for key, value in obj.items()}
    arguments = captured_arguments(obj)
    if arguments is not None:
        adjusted = {name for name, steps in adjustments(obj).items() if steps[-1].by == "nemo2"}
        managed = MANAGED | adjusted - _OF_WEIGHTS
        arguments |= {name: value for name, value in edited_arguments(obj).items() if name not in managed}
    elif dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        arguments = {name: getattr(obj, name) for name in explicit_fields(obj)}
    else:
        return as_megatron_has_it(obj)
    kept = {name: described(value) for name, value in arguments.items() if name not in without}
    return Config(type(obj), bind_args=False, **kept)


def _refuse_changed(directory: Path) -> None:
    """Raise an error if a file of ``context/`` differs from the manifest beside it. The files are small."""
    manifest = read_manifest(directory.parent)
    if manifest is None:
        return
    names = [name for name in manifest.hashes if not is_loaded(name)]
    if differing := comparing(directory.parent, manifest, names)():
        raise CheckpointError(f"{directory.parent} is damaged: {'; '.join(differing[:5])}.")


def why_missing(directory: Path, part: str) -> str:
    """Why ``context/`` does not describe this part, as the end of a sentence. "": no reason is known."""
    try:
        reason = read_json(directory / "missing.json").get(part)
    except (CheckpointError, AttributeError):
        return ": this file does not exist"
    return f": {reason}" if reason else ""
