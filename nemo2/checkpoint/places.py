# SPDX-License-Identifier: Apache-2.0
"""Where weights are that a path names by a scheme, as in NeMo 2.0: ``hf://`` and ``nemo://``."""

from pathlib import Path
from typing import Optional

from nemo2.checkpoint.directory import finished, read_manifest
from nemo2.checkpoint.foreign_files import nemo_adapters
from nemo2.data.home import models_home

HUGGING_FACE = "hf://"
"""In front of a folder of released weights (``hf:///folder``) or a repository of theirs (``hf://organisation/name``)."""
IMPORTED = "nemo://"
"""In front of the name of an imported model."""


def resolved(path: str) -> Path:
    """The folder of a checkpoint's path, in which ``nemo://name`` stands for an imported model."""
    if path.startswith(IMPORTED):
        return models_home() / path.removeprefix(IMPORTED)
    return Path(path).expanduser()


def missing(path: str) -> Optional[str]:
    """The reason why nothing can start from ``path``, where it names no folder of this machine, and how to come by it; None where
    it does, or where it is a release, which is downloaded. A folder of NeMo 2.0's with additions alone is named too."""
    if path.startswith(HUGGING_FACE):
        return None
    if resolved(path).is_dir():
        return nemo_adapters(resolved(path))
    if not path.startswith(IMPORTED):
        return "this checkpoint directory does not exist. Set the path of an existing checkpoint."
    name = path.removeprefix(IMPORTED)
    return (
        f"no model of this name has been imported: {resolved(path)} does not exist. Import it with `nemo2 import "
        f"hf://{name} --output {resolved(path)}` (or from a folder, hf:///path/to/it). Or start from the release "
        f"directly: set resume.restore_config.path=hf://{name}."
    )


def newest_in(folder: Path) -> Optional[Path]:
    """The checkpoint in ``folder``: itself, the one of the latest step in a run's directory, or that of the last run where
    ``folder`` holds several. None where there is none."""
    if read_manifest(folder) is not None:
        return folder
    runs = [finished(place) for place in (folder, folder / "checkpoints", *folder.glob("*/checkpoints"))]
    return max((run[-1] for run in runs if run), key=lambda item: item[1].saved_at, default=(None, None))[0]
