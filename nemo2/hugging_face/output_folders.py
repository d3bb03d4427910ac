# SPDX-License-Identifier: Apache-2.0
"""Folders that conversions write: imported, merged and pruned checkpoints, exports and adapters."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from nemo2.base.errors import CheckpointError
from nemo2.base.files import locked, output_folder, refuse_existing
from nemo2.checkpoint.directory import MANIFEST, WEIGHTS_PATH, temporary_name
from nemo2.checkpoint.leftovers import delete_dead
from nemo2.checkpoint.paths import HUGGING_FACE, checkpoints_of_runs
from nemo2.hugging_face.adapter_rows import ADAPTER_CONFIG
from nemo2.hugging_face.safetensors_files import CONFIG
from nemo2.hugging_face.streams import refuse_full_disk

_REPLACEABLE = (MANIFEST, WEIGHTS_PATH, CONFIG, ADAPTER_CONFIG)
"""Names in folders that ``overwrite`` replaces: checkpoints, exports and adapters."""


def check_target(target: Path | str, *, overwrite: bool, reads: Sequence[Path | str | None] = ()) -> Path:
    """The path of the folder to write. Called before anything is downloaded or read.

    Args:
        target: The folder to write.
        overwrite: Replace an existing checkpoint, export or empty folder. Other folders may hold anything.
        reads: The checkpoints and folders that are read. A repository has no folder that could be replaced.

    Raises:
        OutputExists: ``target`` exists, and ``overwrite`` is False.
        CheckpointError: ``target`` holds one of ``reads``, checkpoints of runs or the working directory, or is another
            folder than those that are replaced.
        ConfigError: no folder can be written there.
    """
    final = output_folder(target)
    refuse_existing(final, overwrite=overwrite)
    if not final.exists():
        return final
    read = [Path(str(path).removeprefix(HUGGING_FACE)).resolve() for path in (*reads, Path.cwd()) if path is not None]
    lost = [path for path in read if path.is_relative_to(final.resolve())] or checkpoints_of_runs(final)
    if lost:
        raise CheckpointError(
            f"{final} is not replaced, because {lost[0]} would be deleted with it. Use another directory."
        )
    if any(final.iterdir()) and not any((final / name).exists() for name in _REPLACEABLE):
        raise CheckpointError(
            f"{final} is not replaced, because it is neither a checkpoint nor an export. Use another directory."
        )
    return final


@contextmanager
def new_folder(target: Path, num_bytes: int, *, overwrite: bool, reads: Sequence[Path | str | None]) -> Iterator[Path]:
    """A temporary folder beside ``target``, which the caller fills and renames. After a failure nothing remains. What a killed
    process left of the same target is deleted.

    Raises:
        CheckpointError: see `check_target`; or the disk has no room, or a write failed.
    """
    check_target(target, overwrite=overwrite, reads=reads)
    temporary = temporary_name(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        delete_dead(target)
        refuse_full_disk(target, num_bytes)
        temporary.mkdir()
        with locked(temporary):
            yield temporary
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(f"{target} can't be written: {reason}. The incomplete folder was deleted.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
