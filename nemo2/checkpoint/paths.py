# SPDX-License-Identifier: Apache-2.0
"""Finds the folder of the weights that a user names: a path, or as in NeMo 2.0 ``hf://`` and ``nemo://``;
and the digests by which adapters recognize the weights that they were trained on."""

import contextlib
import hashlib
from pathlib import Path
from typing import Optional

from nemo2.base.backend.extras import install
from nemo2.base.errors import CheckpointError, ConfigError
from nemo2.base.files import update_with_samples
from nemo2.checkpoint.directory import WEIGHTS_PATH, finished, read_manifest, without_last
from nemo2.checkpoint.foreign_files import nemo_adapters
from nemo2.data.home import models_home

HUGGING_FACE = "hf://"
"""The prefix of a folder of released weights (``hf:///folder``) or of a repository (``hf://organisation/name``)."""
IMPORTED = "nemo://"
"""The prefix of the name of an imported model."""
OF_RELEASE = "release:"
"""The prefix of digests of released weights, which have no manifest with hashes."""
_DOWNLOADED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken")
"""The files to download: weights, configuration and tokenizer, but no pickles and no code."""


def checkpoint_at(path: str) -> Path:
    """The checkpoint that a path names: its folder, or the newest checkpoint in the folder of a run. ``nemo://name``
    stands for an imported model. A checkpoint that was named as the last of its run is found after a newer one has become the
    last. A folder without a finished checkpoint of nemo2 is returned unchanged."""
    folder = models_home() / path.removeprefix(IMPORTED) if path.startswith(IMPORTED) else Path(path).expanduser()
    folder = folder if folder.exists() or not without_last(folder).exists() else without_last(folder)
    return folder if read_manifest(folder) is not None else next(iter(checkpoints_of_runs(folder)), folder)


def folder_of(path: str, *, local_files_only: bool = False) -> Path:
    """The folder of weights: of the checkpoint that a path names (`checkpoint_at`), or of a release.

    ``hf:///folder`` is a folder with config.json and safetensors. ``hf://organisation/name``, or
    ``hf://organisation/name@revision``, is a repository of Hugging Face's hub: its snapshot in the cache of
    huggingface_hub, which is downloaded if it is missing.

    Raises:
        CheckpointError: released weights are missing, or can't be downloaded.
        ConfigError: a ``hf://`` path has neither form, or huggingface_hub isn't installed.
    """
    if not path.startswith(HUGGING_FACE):
        return checkpoint_at(path)
    name = path.removeprefix(HUGGING_FACE)
    if name.startswith("/"):
        if not Path(name).is_dir():
            raise CheckpointError(f"{path}: the folder does not exist.")
        return Path(name)
    repository, _, revision = name.partition("@")
    if repository.count("/") != 1:
        raise ConfigError(f"{path}: write a repository as hf://organisation/name, and a folder as hf:///path/to/it.")
    from nemo2.data.hub import asking_hub

    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ConfigError(f"{path}: huggingface_hub, which downloads it, isn't installed: {install('hf')}.") from error
    try:
        with contextlib.nullcontext() if local_files_only else asking_hub(repository):
            return Path(
                snapshot_download(
                    repository,
                    revision=revision or None,
                    allow_patterns=list(_DOWNLOADED),
                    local_files_only=local_files_only,
                )
            )
    except Exception as error:  # the hub's client raises many types: no network, no such repository, no access
        raise CheckpointError(
            f"{path} cannot be downloaded: {' '.join(str(error).split())[:300].rstrip('.')}. Download it on a machine with a "
            "network, and name the folder: hf:///path/to/it."
        ) from error


def missing(path: str) -> Optional[str]:
    """Why a run can't start from ``path``, and the fix, if it is not a folder of this machine. None: it is, or it is
    a release, which is downloaded. A folder without weights and one of NeMo 2.0's with adapters only are reported
    too."""
    if path.startswith(HUGGING_FACE):
        return None
    folder = checkpoint_at(path)
    if folder.is_dir():
        return nemo_adapters(folder) or _no_weights(folder)
    if not path.startswith(IMPORTED):
        return "this checkpoint directory does not exist. Set the path of an existing checkpoint."
    name = path.removeprefix(IMPORTED)
    return (
        f"no model of this name has been imported: {folder} does not exist. Import it with `nemo2 import "
        f"hf://{name} --output {folder}` (or from a folder, hf:///path/to/it). Or start from the release "
        f"directly: set resume.restore_config.path=hf://{name}."
    )


def _no_weights(folder: Path) -> Optional[str]:
    if read_manifest(folder) is not None or any((folder / name / ".metadata").is_file() for name in ("", WEIGHTS_PATH)):
        return None
    if (folder / "config.json").is_file():
        return f"this folder contains a Hugging Face release. Write it as {HUGGING_FACE}{folder.absolute()}."
    return f"this folder contains no finished checkpoint. `nemo2 show {folder} --checkpoint` shows what it contains."


def checkpoints_of_runs(folder: Path) -> list[Path]:
    """The finished checkpoints of nemo2 in ``folder``, the directory of a run or of several. The newest of each run, the
    last saved first, and then the older ones. At the end those beside the runs, such as a merged model."""
    beside, *runs = (finished(one) for one in checkpoint_folders(folder))
    by_age = [
        [item for run in group for item in run[part]]
        for group in (runs, [beside])
        for part in (slice(-1, None), slice(None, -1))
    ]
    return [path for items in by_age for path, _ in sorted(items, key=lambda item: item[1].saved_at, reverse=True)]


def checkpoint_folders(folder: Path) -> list[Path]:
    """The folders in which checkpoints of ``folder`` can be: itself, or the directory of a run or of several runs."""
    return [folder, folder / "checkpoints", *sorted(folder.glob("*/checkpoints"))]


def digest_of(path: str) -> str:
    """The digest of the weights at ``path``. "": unknown, because they aren't on this machine or have no manifest.

    Of a checkpoint: SHA-256 over the hashes of its tensors' files in its manifest. Two imports of the same release have
    the same digest. Of released weights: SHA-256 over the name, the size and blocks of each safetensors file
    (`nemo2.base.files.update_with_samples`). Training changes nearly all bytes of a file, so these blocks are enough. Reading
    everything would take minutes.
    """
    if not path.startswith(HUGGING_FACE):
        manifest = read_manifest(checkpoint_at(path))
        hashes = {} if manifest is None else manifest.hashes
        files = sorted(f"{name}:{value};" for name, value in hashes.items() if name.endswith(".distcp"))
        return hashlib.sha256("".join(files).encode()).hexdigest() if files else ""
    digest = hashlib.sha256()
    try:
        for file in sorted(folder_of(path, local_files_only=True).glob("*.safetensors")):
            digest.update(f"{file.name}:{file.stat().st_size};".encode())
            update_with_samples(digest, file)
    except (CheckpointError, ConfigError, OSError):
        return ""
    return OF_RELEASE + digest.hexdigest()
