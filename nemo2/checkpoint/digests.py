# SPDX-License-Identifier: Apache-2.0
"""Digests of a run's initial weights, by which adapters recognize the weights that they were trained on."""

import hashlib
from pathlib import Path

from nemo2.checkpoint.directory import read_manifest
from nemo2.files import update_with_samples

OF_RELEASE = "release:"
"""The prefix of digests of released weights, which have no manifest with hashes."""


def digest_of_checkpoint(path: Path) -> str:
    """The digest of a checkpoint's tensors: SHA-256 over the hashes of their files in its manifest. "": it has no
    manifest. Two imports of the same release have the same digest."""
    manifest = read_manifest(path) if path.is_dir() else None
    hashes = {} if manifest is None else manifest.hashes
    files = sorted(f"{name}:{value};" for name, value in hashes.items() if name.endswith(".distcp"))
    return hashlib.sha256("".join(files).encode()).hexdigest() if files else ""


def digest_of_release(folder: Path) -> str:
    """The digest of released weights: SHA-256 over the name, the size and blocks of each safetensors file
    (`nemo2.files.update_with_samples`).

    Training changes nearly all bytes of a file, so these blocks are enough. Reading everything would take minutes.
    """
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(f"{file.name}:{file.stat().st_size};".encode())
        update_with_samples(digest, file)
    return OF_RELEASE + digest.hexdigest()
