# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of a checkpoint or of released weights: reading it, and giving it to a run that starts from them."""

import logging
from pathlib import Path
from typing import Any, Optional

from nemo2.base.errors import CheckpointError, ConfigError, DataError, SecurityError
from nemo2.base.files import read_bounded
from nemo2.checkpoint.context import described, describes, load_context, tokenizer_identity, why_missing
from nemo2.checkpoint.directory import CONTEXT_PATH, read_manifest
from nemo2.checkpoint.foreign_files import MOST_BYTES, refuse_outside
from nemo2.checkpoint.paths import folder_of, missing
from nemo2.data.tokenizer import AutoTokenizer
from nemo2.data.tokenizer_files import files_of, tokenizer_files

_log = logging.getLogger(__name__)
_NEMO_TOKENIZERS = ("nemo_tokenizer", "tokenizer")
"""Folders in the ``context`` of NeMo 2.0 that hold a tokenizer of Hugging Face's."""


def read_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of the weights in ``folder``, of any format. None: it has none that works without code of its own.

    Args:
        trust_remote_code: Allow a tokenizer of nemo2's to run the Python code beside its files.

    Raises:
        CheckpointError: the files differ from those of the training.
        ConfigError: transformers isn't installed.
        SecurityError: the description names something outside the allow-list, or a file leads out of its folder.
    """
    if describes(folder, "tokenizer"):
        trusted = ["transformers:trust_remote_code"] if trust_remote_code else []
        tokenizer = load_context(folder, "tokenizer", allowed_modules=trusted)
        refuse_another_tokenizer(folder, tokenizer)
        return tokenizer
    if read_manifest(folder) is not None:
        return None
    if not (folder / CONTEXT_PATH).is_dir():
        return _read_released(folder)
    folders = (folder / CONTEXT_PATH / name for name in _NEMO_TOKENIZERS)
    return next((_read_released(one) for one in folders if one.is_dir() and tokenizer_files(one)), None)


def take_tokenizer(path: str, model: Any, data: Any = None, *, resumed_from: Optional[Path] = None) -> None:
    """Set the tokenizer of the weights at ``path`` on ``model``, and on ``data`` if both have the same tokenizer.

    Replacing a tokenizer by one with other ids is reported. If the weights have no tokenizer, the run keeps its own and
    reports that.

    Args:
        path: As in `folder_of`.
        resumed_from: The checkpoint that the run resumes from, which has the tokenizer too if there are no weights at
            ``path`` any more. None: the run starts from ``path``.

    Raises:
        CheckpointError, ConfigError, SecurityError: see `folder_of`, `missing` and `read_tokenizer`.
    """
    try:
        folder = folder_of(path)
        if (why := missing(path)) is not None:
            raise CheckpointError(f"resume.restore_config.path={path}: {why}")
    except (CheckpointError, ConfigError):
        if resumed_from is None:
            raise
        folder = resumed_from
    own = getattr(model, "tokenizer", None)
    if own is not None and describes(folder, "tokenizer") and _is_described_in(folder, own):
        return
    try:
        theirs = read_tokenizer(folder)
    except (CheckpointError, SecurityError) as error:
        raise type(error)(
            f"resume.restore_config.load_artifacts=True: {error} To keep the tokenizer of the run, set "
            "resume.restore_config.load_artifacts=False."
        ) from error
    if theirs is None:
        if (context := folder / CONTEXT_PATH).is_dir():
            why = why_missing(context, "tokenizer")
            _log.info("%s does not describe a tokenizer%s. The run keeps its own tokenizer, %s.", folder, why, own)
        return
    if own is not None:
        if getattr(own, "unique_identifiers", None) == theirs.unique_identifiers:
            return
        _log.warning(
            "The tokenizer of %s, %s, replaces the run's own tokenizer, %s, which gives other ids. To keep the run's "
            "own tokenizer, set resume.restore_config.load_artifacts=False.",
            folder,
            theirs,
            own,
        )
    if data is not None and getattr(data, "tokenizer", None) is own:
        data.tokenizer = theirs
    model.tokenizer = theirs


def refuse_another_tokenizer(checkpoint: Path, tokenizer: Any) -> None:
    """Check that the tokenizer that a checkpoint describes is the one its model was trained with. A name on the hub may
    stand for other files by now. Values that the checkpoint doesn't contain aren't compared.

    Raises:
        CheckpointError: the tokenizer has other ids.
    """
    manifest = read_manifest(checkpoint)
    trained = {} if manifest is None else manifest.settings.get("tokenizer_identity", {})
    identity = tokenizer_identity(tokenizer) if trained else {}
    apart = [name for name in identity if trained.get(name, identity[name]) != identity[name]]
    if apart:
        differences = ", ".join(f"{name} {identity[name]:.16} in place of {trained[name]:.16}" for name in apart)
        raise CheckpointError(
            f"{tokenizer!r} is not the tokenizer that the model of {checkpoint} was trained with ({differences}), so its ids "
            "stand for other words. Restore the files that this name stood for in the Hugging Face cache. To avoid "
            "this problem, give the tokenizer as a folder, which travels with the checkpoint, or give a name with a "
            "revision."
        )


def _read_released(folder: Path) -> Optional[AutoTokenizer]:
    """The tokenizer in a Hugging Face folder. None, with a message: it has none that works without its own code."""
    files = tokenizer_files(folder)
    if not files:
        _log.warning("%s contains no tokenizer. A run from these weights must set its own tokenizer.", folder)
        return None
    for file in files:
        refuse_outside(folder, file.relative_to(folder).as_posix())
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


def _is_described_in(checkpoint: Path, tokenizer: Any) -> bool:
    """Whether ``context/`` has all arguments of a tokenizer. It lacks those of a tokenizer with its own files."""
    from nemo2.config.serialize import to_json

    try:
        own = to_json(described(tokenizer), indent=1)
    except Exception:  # any error of a user's class
        return False
    there = read_bounded(checkpoint / CONTEXT_PATH / "tokenizer.json", at_most=MOST_BYTES)
    return not files_of(tokenizer) and own.encode() + b"\n" == there
