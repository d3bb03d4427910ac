# SPDX-License-Identifier: Apache-2.0
"""What killed processes leave. In a run's directory of checkpoints, saves that everybody had written are published, and the
rest is deleted. Beside another folder, the next process that writes it deletes what is left (`delete_dead`)."""

import contextlib
import logging
from collections.abc import Collection
from pathlib import Path

from nemo2.base.errors import CheckpointError, Nemo2Error
from nemo2.base.files import locked, parse_json
from nemo2.checkpoint.directory import (
    MANIFEST,
    WEIGHTS_PATH,
    WRITTEN,
    Manifest,
    commit,
    delete,
    leftovers,
    name_of,
    problems,
    publish,
    read_manifest,
    temporary_name,
    unfinished,
)
from nemo2.checkpoint.lock import DirectoryLock

_log = logging.getLogger(__name__)


def clean_up(directory: Path) -> list[Path]:
    """Publish the saves in ``directory`` that were written completely, and delete the other leftovers of interrupted saves
    and deletions. Only the process with the lock calls it. Returns the deleted paths."""
    _publish_all(_saves(directory))
    deleted = leftovers(directory)
    for path in deleted:
        delete(path)
    for path in directory.glob(".run-*"):  # see `lineage.begin`
        path.unlink(missing_ok=True)
    return deleted


def publish_written(directory: Path) -> list[Path]:
    """Publish the saves in ``directory`` that all ranks had written when their run was killed, unless another run writes
    there. Returns the new checkpoints, oldest first. One process calls it.

    The files aren't read: each writer flushed its files to disk and then recorded their hashes, which the next load
    compares.
    """
    try:
        if not (saves := _saves(directory)):
            return []
        lock = DirectoryLock(directory, wait_seconds=0.0, earlier_start_seconds=0.0).acquire()
    except (OSError, Nemo2Error):  # a run writes there, or this user may not
        return []
    try:
        return _publish_all(saves)
    finally:
        lock.release()


def delete_dead(target: Path) -> None:
    """Delete what killed writers of ``target`` have left beside it. A living writer holds a lock (`locked`)."""
    for left in leftovers(target.parent):
        if name_of(left).name == target.name:
            with contextlib.suppress(OSError), locked(left) as dead:
                if dead:
                    delete(left)


def delete_failed(temporary: Path) -> None:
    """Delete a save that has failed, unless everything of it is written: the next start publishes that."""
    with contextlib.suppress(OSError, ValueError, CheckpointError):
        if (manifest := read_manifest(temporary)) is not None:
            recorded = {} if manifest.files else _recorded(temporary, manifest)
            refuse_missing_shards(temporary / WEIGHTS_PATH, recorded)
            return
    delete(temporary)


def _saves(directory: Path) -> list[Path]:
    """The unpublished saves in ``directory`` with a manifest, oldest first."""
    saves = [path for path in unfinished(directory) if not path.is_symlink() and (path / MANIFEST).is_file()]
    return sorted(saves, key=lambda path: (path / MANIFEST).stat().st_mtime)


def _publish_all(saves: list[Path]) -> list[Path]:
    return [name_of(path) for path in saves if publish_if_written(path, name_of(path))]


def publish_if_written(temporary: Path, target: Path) -> bool:
    """Publish a save of a run that has failed or was killed, if everything of it is written. Any process may call it, whatever
    the others do. Never raises. Returns whether this process has published it."""
    claimed = temporary_name(target)
    try:
        manifest = read_manifest(temporary)
        if manifest is None:
            return False
        hashes = {} if manifest.files else _recorded(temporary, manifest)
        faults = [*problems(temporary), *problems(temporary, of_context=True)]
        if faults:
            raise CheckpointError(faults[0])
        refuse_missing_shards(temporary / WEIGHTS_PATH, hashes)
        temporary.rename(claimed)  # of several processes only one succeeds
        if manifest.files:  # it was interrupted between the last write and the rename
            commit(claimed, target, manifest.run)
        else:
            publish(claimed, target, manifest, hashes)
    except FileNotFoundError:  # a rank has not written its part, or another process publishes
        return False
    except Exception as error:
        _log.warning("%s was written but could not be published: %s", target, " ".join(str(error).split()))
        return False
    _log.warning("Saved %s, which all ranks had written before the run failed.", target)
    return True


def record_of(temporary: Path, rank: int) -> Path:
    """The file that tells that a rank has written its part, with the hashes of its files by name."""
    return temporary / f"{WRITTEN}{rank}"


def _recorded(temporary: Path, manifest: Manifest) -> dict[str, str]:
    """The hashes of the files of all ranks, by path inside the checkpoint. Raises FileNotFoundError if a rank has no record."""
    parts = [parse_json(record_of(temporary, rank).read_bytes()) for rank in range(manifest.layout["world_size"])]
    return {f"{WEIGHTS_PATH}/{name}": digest for part in parts for name, digest in part.items()}


def refuse_missing_shards(weights: Path, recorded: Collection[str] = ()) -> None:
    """Check that every shard in the index of tensors exists, whatever was reported by its writer, and every file in
    ``recorded``.

    Raises:
        CheckpointError: shards are missing or too short.
    """
    from nemo2.checkpoint.metadata import lost_shards, read_metadata

    lost = {Path(path).name for path in recorded if not (weights / Path(path).name).is_file()}
    if missing := sorted(lost | lost_shards(weights, read_metadata(weights)).keys()):
        raise CheckpointError(
            f"{len(missing)} shards are missing in {weights.parent}, among them {missing[0]}. The checkpoint was not "
            "published. Set log.log_dir to a directory that all nodes share."
        )
