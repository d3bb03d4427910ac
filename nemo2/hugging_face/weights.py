# SPDX-License-Identifier: Apache-2.0
"""Released weights that a user names as a whole: config.json decides the family and the sizes of the model."""

import re
from pathlib import Path
from typing import Any, Optional

from nemo2.checkpoint.directory import read_manifest
from nemo2.checkpoint.places import HUGGING_FACE
from nemo2.config import Config
from nemo2.config.tree import as_config
from nemo2.hugging_face.released import open_released
from nemo2.hugging_face.restore import folder_of
from nemo2.hugging_face.safetensors_files import CONFIG

_TIME_OF_START = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}_[0-9]{2}-[0-9]{2}-[0-9]{2}")
"""The name of the folder of one start, in the folder of its run."""


def release_at(source: str) -> Optional[str]:
    """The path of the released weights that ``source`` names, as ``restore_config.path`` has it. None: it names no release.

    Args:
        source: ``hf://organisation/name``, ``hf:///folder``, or a folder with config.json.
    """
    if source.startswith(HUGGING_FACE):
        return source
    folder = Path(source).expanduser()
    released = (folder / CONFIG).is_file() and read_manifest(folder) is None
    return f"{HUGGING_FACE}{folder.absolute()}" if released else None


def released_model(path: str) -> Any:
    """The model of the release at ``path`` as an editable config. The release is downloaded if it is missing.

    Raises:
        CheckpointError, ConfigError, SecurityError: see `folder_of` and `open_released`.
    """
    released = open_released(folder_of(path))
    return Config(released.conversion.model, config=as_config(released.config))


def name_of_weights(source: str) -> str:
    """The name of the weights at ``source``: the repository's, the run's, or that of the folder."""
    if source.startswith(HUGGING_FACE) and not source.startswith(f"{HUGGING_FACE}/"):
        return source.removeprefix(HUGGING_FACE).partition("@")[0]
    folder = Path(source.removeprefix(HUGGING_FACE)).expanduser().absolute()
    return folder.parent.name if _TIME_OF_START.match(folder.name) else folder.name
