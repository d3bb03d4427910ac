# SPDX-License-Identifier: Apache-2.0
"""A checkpoint on disk: its name, when it is finished, and how the newest one is found.

``<name>/weights`` holds Megatron-Core's distributed checkpoint. ``<name>/context`` rebuilds model, tokenizer and data.
``<name>/manifest.json`` lists the files. A checkpoint is written under a hidden temporary name beside its own and
renamed when it is complete: **the rename is the commit**. A directory under a checkpoint's name is therefore finished,
and the leftovers of a crash have names that are never searched (`leftovers`). The manifest has the size and the SHA-256 of every
file, so that later damage by a disk is detected before the files are loaded.
"""

import contextlib
import errno
import hashlib
import json
import logging
import math
import os
import re
import shutil
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Optional

from nemo2.base.advice import advice, new_name
from nemo2.base.backend.extras import version_of
from nemo2.base.errors import CheckpointError
from nemo2.base.files import parse_json, read_bounded, replacing, why_not_inside
from nemo2.base.files import sha256 as _sha256
from nemo2.checkpoint.writer_process import TRANSIENT, persistently

_log = logging.getLogger(__name__)
WEIGHTS_PATH = "weights"
CONTEXT_PATH = "context"
MANIFEST = "manifest.json"
LAST_SUFFIX = "-last"
WRITTEN = ".written-"
"""The prefix of the records in an unpublished save, one per rank, each with the hashes of the files that the rank wrote."""
_TEMPORARY = ".unfinished-"
_TRASH = ".trash-"
_REPLACED = ".replaced-"
_DAMAGED = ".damaged-"
MANIFEST_VERSION = 2
_HASHING_THREADS = 4
_MOST_MANIFEST = 256 << 20


@dataclass(kw_only=True)
class Manifest:
    """The manifest of a checkpoint; plain JSON, written last."""

    step: int
    """The number of completed optimizer steps."""
    consumed_samples: int
    layout: dict[str, Any]
    """The parallel sizes and the world size of the save."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics at the time of the save, such as ``val_loss``. Retention ranks checkpoints by them."""
    weights_only: bool = False
    part_of: Optional[str] = None
    """The checkpoint with the rest of the model, if this checkpoint holds only a part. None: it holds all of it."""
    part_of_digest: str = ""
    """The digest of the weights there (`nemo2.checkpoint.paths.digest_of`). "": unknown."""
    run: str = ""
    """The id of the run that saved it, see `lineage`. "": a version without ids saved it."""
    lineage: list[str] = field(default_factory=list)
    """The ids of the runs that this run continues, oldest first."""
    returned_to: list[float] = field(default_factory=list)
    """``saved_at`` of each checkpoint of this run to which the run went back (``resume.resume_from_path``), oldest first.
    Checkpoints with a shorter list are of an earlier attempt."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Facts of the run that ``context/`` doesn't contain: precision, seed, vocabulary, steps."""
    versions: dict[str, str] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    """Size in bytes of every file, by its path inside the checkpoint."""
    hashes: dict[str, str] = field(default_factory=dict)
    """The SHA-256 of every file. Empty in checkpoints of versions without hashes."""
    saved_at: float = 0.0
    """The time of the save, in seconds since the epoch."""
    version: int = MANIFEST_VERSION
    digest: str = ""
    """The SHA-256 of all other fields. "" in checkpoints of versions without hashes."""

    def finite_metric(self, name: Optional[str]) -> Optional[float]:
        """The metric to rank by. None: it wasn't recorded, or isn't a finite number."""
        value = self.metrics.get(name or "")
        return value if isinstance(value, int | float) and abs(value) < math.inf else None


def versions() -> dict[str, str]:
    """The versions of the packages that determine the checkpoint's format, for its manifest."""
    return {name: version_of(name) or "" for name in ("nemo2", "megatron-core", "torch", "lightning")}


def weights_dir(checkpoint: Path) -> Path:
    """The folder with Megatron-Core's files: ``weights`` inside the checkpoint, or the directory itself."""
    inside = checkpoint / WEIGHTS_PATH
    return inside if inside.is_dir() else checkpoint


def ckpt_to_dir(filepath: os.PathLike | str) -> Path:
    """The directory of the checkpoint that Lightning would name ``<filepath>.ckpt``."""
    path = Path(filepath)
    return path.with_suffix("") if path.suffix == ".ckpt" else path


def ckpt_to_context_subdir(filepath: os.PathLike | str) -> Path:
    """The folder of a checkpoint that describes its model, under NeMo's name."""
    path = ckpt_to_dir(filepath)
    return path if path.name == CONTEXT_PATH else path / CONTEXT_PATH


def temporary_name(target: Path, attempt: Optional[str] = None) -> Path:
    """The directory in which ``target`` is written until it is complete. Every rank must use the same ``attempt``."""
    return target.with_name(f"{_TEMPORARY}{attempt or uuid.uuid4().hex[:8]}-{target.name}")


def publish(
    temporary: Path,
    target: Path,
    manifest: Manifest,
    hashes: Optional[Mapping[str, str]] = None,
    *,
    overwrite: bool = False,
) -> None:
    """Write the manifest, flush all files to disk and rename the folder: the checkpoint then exists. One process calls
    it. An existing checkpoint of the same run is replaced, and a folder that is no checkpoint is set aside.

    Args:
        overwrite: Replace whatever has this name.
        hashes: The SHA-256 of files whose writers have computed it, by path inside the checkpoint. Other files are read
            and hashed.

    Raises:
        CheckpointError: a checkpoint of another run has this name.
    """
    # A killed publication may have left a part of the manifest, which `write_manifest` deletes.
    own = {temporary / MANIFEST, *temporary.glob(f"{WRITTEN}*"), *temporary.glob(f".{MANIFEST}.*")}
    manifest.files = {
        str(path.relative_to(temporary)): path.stat().st_size
        for path in sorted(temporary.rglob("*"))
        if path.is_file() and path not in own
    }
    computed = hashes or {}
    manifest.hashes = {name: computed.get(name) or sha256(temporary / name) for name in manifest.files}
    manifest.saved_at = time.time()
    write_manifest(temporary, manifest)
    commit(temporary, target, manifest.run, overwrite=overwrite)


def commit(temporary: Path, target: Path, run: str, *, overwrite: bool = False) -> None:
    """The end of `publish`, once the manifest lists all files: remove the ranks' records and rename the folder. Arguments and
    errors are those of `publish`; ``run`` is the manifest's."""
    for record in temporary.glob(f"{WRITTEN}*"):
        record.unlink()
    if target.exists() and not overwrite:
        # Only a checkpoint of `run` is replaced; an unfinished one is set aside. "": no run is known, as of a
        # checkpoint that the user's own code saves.
        try:
            existing = read_manifest(target)
        except CheckpointError:
            existing = None
        if existing is None:
            _log.warning("%s was no finished checkpoint. It was renamed to %s.", target, set_aside(target).name)
        elif run and existing.run not in ("", run):
            raise CheckpointError(
                f"{target} is a checkpoint of run {existing.run}, but this run is {run}. It was not replaced. For this run, "
                f"{new_name()}, log.version or log.explicit_log_dir."
            )
    take_place(temporary, target)


@contextlib.contextmanager
def saving_to(target: Path | str) -> Iterator[None]:
    """A context for code that writes to ``target``.

    Raises:
        CheckpointError: the system refuses it.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"Cannot write {target}: {error.strerror or error}. Make the directory writable, or set log.log_dir."
        ) from error


def take_place(temporary: Path, target: Path) -> None:
    """Flush a folder to disk and rename it to ``target``. An existing folder of that name is deleted afterwards. One
    process calls it."""
    for path in (*temporary.rglob("*"), temporary):  # a folder too: it holds the names of its files
        _fsync(path)
    if target.exists():
        # The same step is saved again, for example after a resume from an earlier step. The old checkpoint is renamed
        # and deleted afterwards. Between the two renames it still counts, see `finished`.
        aside = target.with_name(f"{_REPLACED}{uuid.uuid4().hex[:8]}-{target.name}")
        _rename(target, aside)
        _rename(temporary, target)
        delete(aside)
    else:
        _rename(temporary, target)
    _fsync(target.parent)


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint. It is renamed first, so that no reader finds a half-deleted one."""
    if not checkpoint.exists():
        return
    trash = trash_name(checkpoint)
    _rename(checkpoint, trash)
    delete(trash)


def trash_name(path: Path) -> Path:
    """A name beside ``path`` for a folder that is deleted, at the latest when the next run starts (`clean_up`)."""
    return path.with_name(f"{_TRASH}{uuid.uuid4().hex[:8]}-{path.name}")


def delete(path: Path) -> None:
    """Delete a folder, ignoring errors. Of a link, only the link is deleted."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def write_manifest(checkpoint: Path, manifest: Manifest) -> None:
    """Write the manifest, with a digest of its contents."""
    data = json.loads(json.dumps(asdict(manifest)))
    text = json.dumps({**data, "digest": _digest(data)}, indent=1, sort_keys=True)
    with replacing(checkpoint / MANIFEST, by_user=False) as unfinished:  # a kill must not leave half of it
        persistently(unfinished.write_text, text + "\n")


def read_manifest(checkpoint: Path) -> Optional[Manifest]:
    """The manifest of a finished checkpoint of nemo2. None: there is none.

    Raises:
        CheckpointError: the manifest exists but is unreadable.
    """
    path = checkpoint / MANIFEST
    try:
        data = parse_json(persistently(lambda: read_bounded(path, at_most=_MOST_MANIFEST, follow=False)))
        if data.get("digest") and data["digest"] != _digest(data):
            raise ValueError("its contents have changed since it was written (the digest differs)")
        values = {name: data[name] for name in Manifest.__dataclass_fields__ if name in data}
        manifest = Manifest(**values)
        _check_entries(manifest)
        return manifest
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError as error:
        raise _not_permitted(path) from error
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}), so the checkpoint is damaged. Resume from another checkpoint in "
            f"{checkpoint.parent}."
        ) from error


def problems(checkpoint: Path, *, of_context: bool = False) -> list[str]:
    """Why a checkpoint can't be loaded, judging by file names and sizes. Empty: no problems.

    ``context/`` doesn't count, because training works without it. ``of_context``: its problems instead.
    """
    manifest = read_manifest(checkpoint)
    if manifest is None:
        return [] if of_context else [f"{MANIFEST} is missing"]
    names = [name for name in manifest.files if is_loaded(name) != of_context]
    return [problem for name in names if (problem := _misses(checkpoint, name, manifest))]


def changed(checkpoint: Path) -> list[str]:
    """The files, including those of ``context/``, whose hashes differ from the manifest's. Reads all files
    completely."""
    manifest = read_manifest(checkpoint)
    return [] if manifest is None else comparing(checkpoint, manifest, [*manifest.hashes])()


def comparing(checkpoint: Path, manifest: Manifest, names: Sequence[str]) -> Callable[[], list[str]]:
    """Start to hash these files in parallel with the caller. hashlib releases the interpreter's lock.

    Returns a function that waits for the hashes and returns the files that differ.
    """
    left, answers = deque(names), dict[str, Optional[str]]()

    def work() -> None:
        with contextlib.suppress(IndexError):
            while True:
                name = left.popleft()
                answers[name] = _misses(checkpoint, name, manifest) or _differs(
                    checkpoint / name, name, manifest.hashes[name]
                )

    # Not an executor's threads: the interpreter waits for those at exit, and a failed run must not keep hashing.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(_HASHING_THREADS, len(names)))]
    for thread in threads:
        thread.start()

    def wait() -> list[str]:
        for thread in threads:
            thread.join()
        # No answer counts as damage.
        return [
            problem for name in names if (problem := answers.get(name, f"{name} could not be compared")) is not None
        ]

    return wait


def is_loaded(name: str) -> bool:
    """Whether loading needs this file of a checkpoint."""
    return not name.startswith(f"{CONTEXT_PATH}/")


def sha256(path: Path | str) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    return persistently(_sha256, path)


def set_aside(checkpoint: Path) -> Path:
    """Rename a damaged checkpoint so that it is never found again, and return the new path. It is kept for a repair."""
    target = checkpoint.with_name(f"{_DAMAGED}{uuid.uuid4().hex[:8]}-{checkpoint.name}")
    os.rename(checkpoint, target)
    return target


def unusable(directory: Path) -> dict[Path, str]:
    """Entries of ``directory`` that look like a checkpoint but aren't finished, with the reason."""
    reasons = {}
    for path in _entries(directory):
        if path.name.startswith("."):
            if path.name.startswith(_DAMAGED):
                reasons[path] = "was damaged and has been set aside"
            continue
        try:
            if read_manifest(path) is None and (path / WEIGHTS_PATH).is_dir():
                reasons[path] = f"{MANIFEST} is missing"
        except CheckpointError:
            reasons[path] = f"{MANIFEST} cannot be read"
    return reasons


def unfinished(directory: Path) -> list[Path]:
    """The folders of saves in ``directory`` that are not published. A living run may be writing them."""
    return [path for path in _entries(directory) if path.name.startswith(_TEMPORARY)]


def leftovers(directory: Path) -> list[Path]:
    """What interrupted saves and deletions have left in ``directory``. A living run may still use it."""
    return [
        path
        for path in _entries(directory)
        if path.name.startswith((_TEMPORARY, _TRASH)) or (path.name.startswith(_REPLACED) and not _orphaned(path))
    ]


def name_of(left: Path) -> Path:
    """The folder that is written under a `temporary_name`, or to which one of the `leftovers` belonged."""
    return left.with_name(left.name.split("-", 2)[-1])


def finished(directory: Path) -> list[tuple[Path, Manifest]]:
    """The finished checkpoints directly in ``directory``, oldest step first, without damaged ones. After a run went back to
    one of them, those of the attempts before precede."""
    checkpoints = []
    for path in _entries(directory):
        if path.name.startswith(".") and not _orphaned(path):
            continue
        try:
            manifest = read_manifest(path)
        except CheckpointError:
            continue
        if manifest is not None:
            checkpoints.append((path, manifest))
    return sorted(checkpoints, key=lambda item: (len(item[1].returned_to), item[1].step, item[1].saved_at))


def without_last(path: Path) -> Path:
    """The name of a checkpoint after a newer one has become the last."""
    return path.with_name(path.name.removesuffix(LAST_SUFFIX))


def step_in_name(path: Path) -> Optional[int]:
    """The step in NeMo's file names (``...-step=120-...``). None: the name has none."""
    match = re.search(r"step=(\d+)", path.name)
    return int(match.group(1)) if match else None


def _differs(path: Path, name: str, expected: str) -> Optional[str]:
    try:
        same = sha256(path) == expected
    except Exception as error:  # any error: otherwise a thread's error would be lost
        return f"{name} cannot be read ({getattr(error, 'strerror', None) or repr(error)})"
    return None if same else f"{name} has changed since it was written (its SHA-256 differs)"


def _misses(checkpoint: Path, name: str, manifest: Manifest) -> Optional[str]:
    """Why a file of the manifest is missing, judging by its name and size. None: it exists. Nothing is read."""
    file, size = checkpoint / name, manifest.files[name]
    if why := why_not_inside(checkpoint, name):
        return f"{name} {why}"
    try:
        there = os.lstat(file).st_size
    except OSError:
        return f"{name} is missing"
    return None if there == size else f"{name} has {there} bytes, but {size} were written"


def _check_entries(manifest: Manifest) -> None:
    """Raise ValueError unless all entries are plain paths inside the manifest's folder, with sizes and hashes."""
    for name, size in manifest.files.items():
        parts = name.split("/")
        if name.startswith("/") or ".." in parts or "\0" in name or not name:
            raise ValueError(f"it names {name!r}, which is outside its folder")
        if not isinstance(size, int) or size < 0:
            raise ValueError(f"it gives {size!r} bytes as the size of {name}")
    for name, digest in manifest.hashes.items():
        if name not in manifest.files:
            raise ValueError(f"it has a hash of {name!r}, which is not one of its files")
        if not isinstance(digest, str):
            raise ValueError(f"it gives {digest!r} as the hash of {name}")
    if not isinstance(manifest.step, int) or not isinstance(manifest.saved_at, int | float):
        raise ValueError(f"its step is {manifest.step!r}, saved at {manifest.saved_at!r}")
    if not isinstance(manifest.returned_to, list):
        raise ValueError(f"it went back to {manifest.returned_to!r}")


def _digest(data: dict[str, Any]) -> str:
    """The SHA-256 of everything in a manifest except the digest."""
    said = {name: value for name, value in data.items() if name != "digest"}
    return hashlib.sha256(json.dumps(said, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _orphaned(path: Path) -> bool:
    """Whether this checkpoint was moved aside for another that was then never renamed into its place."""
    if not path.name.startswith(_REPLACED):
        return False
    return not name_of(path).exists()


def _entries(directory: Path) -> Iterator[Path]:
    try:
        yield from sorted(path for path in directory.iterdir() if path.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return
    except PermissionError as error:
        raise _not_permitted(directory) from error


def _not_permitted(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read, because this user has no permission for it. Ask its owner for access, or "
        f"{new_name()} or another {advice('--dir', 'log.log_dir')}."
    )


def _rename(source: Path, target: Path) -> None:
    """Rename ``source`` to ``target``. A server that restarts may have renamed without an answer, in which case the
    next attempt finds nothing to rename."""
    before = target.exists()

    def attempt() -> None:
        try:
            os.rename(source, target)
        except FileNotFoundError:
            if before or source.exists() or not target.exists():
                raise

    persistently(attempt)


def _fsync(path: Path) -> None:
    # Not after EIO: the kernel then marks the pages as written, and the next fsync would succeed.
    persistently(_fsync_once, path, passing=[number for number in TRANSIENT if number != errno.EIO])


def _fsync_once(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
