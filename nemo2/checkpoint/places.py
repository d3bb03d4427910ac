# SPDX-License-Identifier: Apache-2.0
"""Resolves weights whose path has a scheme, as in NeMo 2.0: ``hf://`` and ``nemo://``."""

from pathlib import Path
from typing import Optional

from nemo2.checkpoint.directory import WEIGHTS_PATH, finished, read_manifest
from nemo2.checkpoint.foreign_files import nemo_adapters
from nemo2.data.home import models_home

HUGGING_FACE = "hf://"
"""The prefix of a folder of released weights (``hf:///folder``) or of a repository (``hf://organisation/name``)."""
IMPORTED = "nemo://"
"""The prefix of the name of an imported model."""


def resolved(path: str) -> Path:
    """The checkpoint that a path names: its folder, or the newest checkpoint in the folder of a run (`newest_in`).
    ``nemo://name`` stands for an imported model. A folder without a finished checkpoint is returned unchanged."""
    folder = models_home() / path.removeprefix(IMPORTED) if path.startswith(IMPORTED) else Path(path).expanduser()
    return newest_in(folder) or folder


def missing(path: str) -> Optional[str]:
    """Why a run can't start from ``path``, and the fix, if it is not a folder of this machine. None: it is, or it is
    a release, which is downloaded. A folder without weights and one of NeMo 2.0's with adapters only are reported
    too."""
    if path.startswith(HUGGING_FACE):
        return None
    folder = resolved(path)
    if folder.is_dir():
        return nemo_adapters(folder) or _no_weights(folder)
    if not path.startswith(IMPORTED):
        return "this checkpoint directory does not exist. Set the path of an existing checkpoint."
    name = path.removeprefix(IMPORTED)
    return (
        f"no model of this name has been imported: {resolved(path)} does not exist. Import it with `nemo2 import "
        f"hf://{name} --output {resolved(path)}` (or from a folder, hf:///path/to/it). Or start from the release "
        f"directly: set resume.restore_config.path=hf://{name}."
    )


def _no_weights(folder: Path) -> Optional[str]:
    if read_manifest(folder) is not None or any((folder / name / ".metadata").is_file() for name in ("", WEIGHTS_PATH)):
        return None
    if (folder / "config.json").is_file():
        return f"this folder contains a Hugging Face release. Write it as {HUGGING_FACE}{folder.absolute()}."
    return f"this folder contains no finished checkpoint. `nemo2 show {folder} --checkpoint` shows what it contains."


def newest_in(folder: Path) -> Optional[Path]:
    """The checkpoint of nemo2 in ``folder``: the folder itself, that of the latest step in a run's directory, or that of
    the last of several runs. None: there is none."""
    if read_manifest(folder) is not None:
        return folder
    return next(iter(checkpoints_of_runs(folder)), None)


def checkpoints_of_runs(folder: Path) -> list[Path]:
    """The finished checkpoints of nemo2 in ``folder``, the directory of a run or of several. The newest of each run, the
    last saved first, and then the older ones."""
    runs = [finished(place) for place in places_of_checkpoints(folder)]
    by_age = [[item for run in runs for item in run[-1:]], [item for run in runs for item in run[:-1]]]
    return [path for items in by_age for path, _ in sorted(items, key=lambda item: item[1].saved_at, reverse=True)]


def places_of_checkpoints(folder: Path) -> list[Path]:
    """The folders in which checkpoints of ``folder`` can be: itself, or the directory of a run or of several runs."""
    return [folder, folder / "checkpoints", *sorted(folder.glob("*/checkpoints"))]
