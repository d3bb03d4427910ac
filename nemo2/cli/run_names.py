# SPDX-License-Identifier: Apache-2.0
"""Finds runs by folder or by name, for the command line.

A name is looked up in the folders below the working directory (`nemo_experiments`, or the folder of ``--dir``) and in
the folders of ``$NEMO2_RUNS``, separated as in ``$PATH``.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Optional

import typer

from nemo2.base.errors import CheckpointError, ConfigError, DataError
from nemo2.base.names import listed, nearest
from nemo2.training.run_dir.records import ENVIRONMENT_FILE, RECIPE_FILE

VARIABLE = "NEMO2_RUNS"
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_SIGNS = (RECIPE_FILE, ENVIRONMENT_FILE)
"""Every run's folder has at least one of these files."""
_JOB = "job.sh"
"""A folder with this file belongs to a Slurm job, whose recipe has the run's name too."""
_CHECKPOINT_HELP = "A checkpoint directory, or a run (directory or name), which stands for its newest checkpoint."
Checkpoint = Annotated[str, typer.Argument(help=_CHECKPOINT_HELP)]


def checkpoint_called(text: str) -> Path:
    """A checkpoint's folder, or the folder that holds the checkpoints of a run.

    Raises:
        CheckpointError: there is no such folder and no run of that name.
        ConfigError: runs in several folders have the name.
    """
    folder = _folder_called(text, CheckpointError)
    if folder.is_file():
        raise CheckpointError(f"{text} is a file, but a checkpoint is a folder. Name a checkpoint, or a run.")
    return folder.absolute()


def run_folder(text: str) -> Path:
    """The folder of one run, or of the run of a checkpoint. If a name has several starts: the folder of the latest.

    Raises:
        DataError: there is no such folder and no run of that name.
        ConfigError: runs in several folders have the name.
    """
    folder = _folder_called(text, DataError)
    return last_started(folder) or run_of(folder) or folder


def run_called(name: str) -> Optional[Path]:
    """The folder of the runs with this name. None: there is none.

    Raises:
        ConfigError: several folders have runs of this name.
    """
    path = Path(name)
    if not name or path.is_absolute() or ".." in path.parts:
        return None
    folders = [folder for folder in dict.fromkeys(base / name for base in _bases()) if last_started(folder) is not None]
    if len(folders) > 1:
        raise ConfigError(
            f"{name!r} names runs in several directories: {', '.join(map(str, folders))}. Use one of these directories."
        )
    return folders[0] if folders else None


def last_started(folder: Path) -> Optional[Path]:
    """The folder itself if it belongs to a run, else the folder of the run in it that started last, which is what a user
    looks at. None: it holds no run.

    A training resumes another one, `nemo2.training.run_dir.directory.furthest_run`.
    """
    if any((folder / sign).is_file() for sign in _SIGNS):
        return folder
    starts = [file for sign in _SIGNS for file in folder.glob(f"*/{sign}") if file.is_file()]
    starts = [file for file in starts if not file.with_name(_JOB).exists()]
    return max(starts, key=lambda file: (file.stat().st_mtime, str(file))).parent if starts else None


def run_of(checkpoint: Path) -> Optional[Path]:
    """The folder of the run whose ``checkpoints`` hold this folder. None: they are no run's."""
    run = checkpoint.absolute().parent.parent
    return run if any((run / sign).is_file() for sign in _SIGNS) else None


def all_runs() -> Iterator[Path]:
    """The folders of all starts of all runs that can be found by name."""
    for base in dict.fromkeys(_bases()):
        files = (
            file for depth in ("*", "*/*") for sign in _SIGNS for file in base.glob(f"{depth}/{sign}") if file.is_file()
        )
        yield from sorted({file.parent for file in files})


def _folder_called(text: str, error: type[Exception]) -> Path:
    """The folder of this path, or of the runs of this name. Raises ``error`` if neither exists."""
    path = Path(text).expanduser()
    folder = path if path.exists() else run_called(text)
    if folder is None:
        hub = f" For a release on Hugging Face's hub, write hf://{text}." if _REPOSITORY.fullmatch(text) else ""
        beside = (
            [str(one.relative_to(path.parent)) for one in path.parent.glob("[!.]*/")] if path.parent.is_dir() else []
        )
        close = [str(path.parent / name) for name in nearest(path.name, beside)]
        if close:
            raise error(f"{text} does not exist; did you mean {' or '.join(close)}?{hub}")
        raise error(f"{text} does not exist: {_known()}.{hub}")
    return folder


def _bases() -> Iterator[Path]:
    yield from (child for child in sorted(Path().iterdir()) if child.is_dir() and not child.name.startswith("."))
    yield from (Path(text).expanduser() for text in os.environ.get(VARIABLE, "").split(os.pathsep) if text)


def _known() -> str:
    """The known names, for an error message."""
    bases = {*_bases()}
    names = dict.fromkeys(run.name if run.parent in bases else run.parent.name for run in all_runs())
    if not names:
        return f"give a run's directory, or the name of a run below the working directory or in ${VARIABLE}"
    return f"give a run's directory, or one of these names: {listed(names, 8)}"
