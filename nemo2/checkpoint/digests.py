# SPDX-License-Identifier: Apache-2.0
"""Digests of a run's initial weights, by which adapters recognize the weights that they were trained on."""

import hashlib

from nemo2.checkpoint.directory import read_manifest
from nemo2.checkpoint.paths import HUGGING_FACE, checkpoint_at, folder_of
from nemo2.errors import CheckpointError, ConfigError
from nemo2.files import update_with_samples

OF_RELEASE = "release:"
"""The prefix of digests of released weights, which have no manifest with hashes."""


def digest_of(path: str) -> str:
    """The digest of the weights at ``path``. "": unknown, because they aren't on this machine or have no manifest.

    Of a checkpoint: SHA-256 over the hashes of its tensors' files in its manifest. Two imports of the same release have
    the same digest. Of released weights: SHA-256 over the name, the size and blocks of each safetensors file
    (`nemo2.files.update_with_samples`). Training changes nearly all bytes of a file, so these blocks are enough. Reading
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
