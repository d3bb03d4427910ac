# SPDX-License-Identifier: Apache-2.0
"""Chooses the directory that a run writes to, the same on all ranks.

The directory is ``<base>/<name>/<version>``. The version of a new run is its start time. The ranks' clocks differ
enough to give different directories, so all ranks use one rank's answer.
"""

import contextlib
import itertools
import json
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Optional

from nemo2.base.errors import ConfigError, Nemo2Error
from nemo2.base.names import safe_name
from nemo2.base.place import LAUNCH_VARIABLE, Place, here
from nemo2.checkpoint.directory import finished, leftovers, unusable
from nemo2.checkpoint.leftovers import clean_up, publish_written
from nemo2.checkpoint.lineage import another_run, own_finished, run_from, run_of
from nemo2.checkpoint.lock import DirectoryLock, holder_is_dead
from nemo2.training.run_dir.records import METRICS_FILE, OWN_FILES

DEFAULT_BASE = "nemo_experiments"
"""The default folder of all runs, below the working directory, as in NeMo 2.0."""

VERSION_VARIABLE = "NEMO2_RUN_VERSION"
"""The variable with the version of a new run, the same for all ranks. The launcher sets it."""

NAMED_VERSION_VARIABLE = "NEMO_EXPM_VERSION"
"""NeMo's variable for the version of a run, new or not, with the meaning of ``log.version``, which overrides it."""

DECISION_VARIABLE = "NEMO2_RUN_DECISION"
"""The variable with a process's decisions for the ranks that Lightning's launcher starts from it: its process id,
and JSON."""

RUN_DIR_FILE_VARIABLE = LAUNCH_VARIABLE
"""The variable that names a file to which rank 0 writes the run directory's path, for the launcher and for a later
start of the same launch."""

CHECKPOINTS = "checkpoints"
_LEFTOVER_SECONDS = 3600.0

_stores: list[Any] = []
_agreements = itertools.count(1)
"""The number of each call of `agree`, the same on all ranks."""


@dataclass(frozen=True, kw_only=True)
class RunDirectory:
    """The directory of a run."""

    log_dir: Path
    """The run's directory."""
    exp_dir: Path
    """The folder of all runs."""
    name: str
    """The name of the experiment. Empty: the directory was named explicitly."""
    version: str | None
    """The folder of this run below the name. None: the layout has no version."""
    resumed: bool
    """Whether the directory already has a finished checkpoint."""

    @property
    def checkpoints(self) -> Path:
        return self.log_dir / CHECKPOINTS


def directory_of(trainer: Any) -> Path:
    """The run directory of a trainer that is set up. Without one, the working directory."""
    for callback in trainer.callbacks:
        directory = getattr(getattr(callback, "directory", None), "log_dir", None)
        if directory is not None:
            return Path(directory)
    return Path()


def choose_directory(
    *,
    name: str,
    log_dir: str | None,
    explicit_log_dir: str | None,
    version: str | None,
    use_datetime_version: bool,
    resume_if_exists: bool,
    meeting: Optional[Place] = None,
) -> RunDirectory:
    """Choose the directory of a run by the first rule that applies:

    1. ``explicit_log_dir`` is used unchanged, without name and version.
    2. ``version``, if given, is the folder's name. Without it, the value of ``NEMO_EXPM_VERSION``.
    3. With ``resume_if_exists``, the version of an earlier start of the same launch, or else the version of this name
      with the newest finished checkpoint.
    4. A new version: the start time as ``%Y-%m-%d_%H-%M-%S``, with a number if another run has this name. No version
       folder without ``use_datetime_version``.

    Nothing is created, but before rule 3 searches, saves that a killed run had written completely are published. In a job of
    several processes this is collective: every rank must call it, with its ``meeting`` (`meeting_of`).

    Raises:
        ConfigError: the name or version is not a valid folder name.
    """
    if explicit_log_dir:
        path = Path(explicit_log_dir).expanduser().absolute()
        return RunDirectory(
            log_dir=path, exp_dir=path, name="", version=None, resumed=bool(finished(path / CHECKPOINTS))
        )
    base = Path(log_dir or DEFAULT_BASE).expanduser().absolute()
    name = safe_name(name or "default")
    root = base / name
    version = requested_version(version)
    if version is None:
        # Rank 0 searches and decides, because another rank could already see files that rank 0 is about to write.
        if resume_if_exists and (meeting is None or meeting.rank == 0):
            for folder in (root / CHECKPOINTS, *root.glob(f"*/{CHECKPOINTS}")):
                publish_written(folder)
        earlier = (_of_an_earlier_start(root) or furthest_run(root)) if resume_if_exists else None
        fresh = (os.environ.get(VERSION_VARIABLE) or _free_version(root)) if use_datetime_version else ""
        decision = fresh if earlier is None else os.path.relpath(earlier, root)
        if resume_if_exists or (use_datetime_version and VERSION_VARIABLE not in os.environ):
            decision = agree(decision, meeting)
        version = None if decision in ("", ".") else decision
    directory = root if version is None else root / safe_name(version)
    return RunDirectory(
        log_dir=directory,
        exp_dir=base,
        name=name,
        version=version,
        resumed=bool(finished(directory / CHECKPOINTS)),
    )


def requested_version(version: str | None) -> str | None:
    """``log.version``, or else the version that NeMo's variable names. None: the user requests none."""
    return version or os.environ.get(NAMED_VERSION_VARIABLE) or None


def refuse_another_run(log_dir: Path, checkpoints: Path, checkpoint: Optional[Path], *, resume_if_exists: bool) -> None:
    """Check that a run may write to a directory, before it replaces, truncates or appends to a file there.

    Args:
        log_dir: The run's directory.
        checkpoints: The directory of its checkpoints.
        checkpoint: The checkpoint from which the run starts. None: it starts from the beginning.
        resume_if_exists: A run that starts from the beginning continues one that was interrupted before its first
            checkpoint.

    Raises:
        CheckpointError: the directory holds checkpoints or metrics of another run. The message names both runs.
    """
    run, before = run_from(checkpoints, checkpoint), run_of(checkpoints)
    interrupted = checkpoint is None and resume_if_exists
    unknown = before is None and checkpoint is not None and checkpoint.parent.resolve() == checkpoints.resolve()
    metrics = log_dir / METRICS_FILE
    is_theirs = before is None or before.id != run.id
    if is_theirs and not interrupted and not unknown and metrics.is_file() and metrics.stat().st_size:
        raise another_run(log_dir, f"{METRICS_FILE}", before.id if before is not None else "", run)


def _free_version(root: Path) -> str:
    """The start time as a folder's name below ``root``, with a number if another run began in the same second."""
    version = timestamp()
    names = (version, *(f"{version}_{number}" for number in range(2, 1000)))
    return next((name for name in names if not (root / name).exists()), version)


def _of_an_earlier_start(root: Path) -> Path | None:
    """The run of an earlier start of this job. A requeued job resumes its own run, even if another run of that name
    has advanced further."""
    try:
        directory = Path(Path(os.environ[RUN_DIR_FILE_VARIABLE]).read_text(encoding="utf-8").strip())
    except (KeyError, OSError):
        return None
    return directory if root in (directory, directory.parent) else None


def furthest_run(root: Path) -> Path | None:
    """The directory below ``root`` whose run has advanced furthest, or ``root`` itself (a run without version).

    Runs are compared by the step of their last finished checkpoint. At the same step a run that continues another run
    wins, then the run that saved later. Time alone would not do: clocks of machines differ, and a short trial could be
    newer than the real run.

    Without a usable checkpoint, the directory of a run with unusable checkpoints is returned, so that `AutoResume`
    reports them rather than a new folder hiding them.
    """
    versions = [path for path in sorted(root.glob("*")) if path.is_dir() and path.name != CHECKPOINTS]
    # Runs that this user may not read are another user's.
    candidates = [path for path in (root, *versions) if os.access(path, os.R_OK | os.X_OK)]
    newest = [
        (last.step, len(last.lineage), last.saved_at, path)
        for path in candidates
        if (checkpoints := own_finished(path / CHECKPOINTS)) and (last := checkpoints[-1][1])
    ]
    if newest:
        return max(newest)[-1]
    broken = [path for path in candidates if unusable(path / CHECKPOINTS)]
    return broken[-1] if broken else None


def delete_leftovers(directory: RunDirectory) -> list[Path]:
    """Delete what killed saves have left in other versions of a run's name that never finished a checkpoint, and to
    which no process writes any more. No run resumes from these versions, so no run cleans them up.

    Returns the deleted paths. Leftovers younger than an hour stay, because some file systems have no locks, unless their
    writer ran on this host and is dead.
    """
    deleted: list[Path] = []
    if directory.version is None or not directory.name:
        return deleted
    for folder in sorted((directory.exp_dir / directory.name).glob(f"*/{CHECKPOINTS}")):
        with contextlib.suppress(OSError, Nemo2Error):  # another user's, or a run writes there
            left = leftovers(folder)
            if folder == directory.checkpoints or not left or finished(folder):
                continue
            young = max(path.stat().st_mtime for path in left) > time.time() - _LEFTOVER_SECONDS
            if young and not holder_is_dead(folder):
                continue
            lock = DirectoryLock(folder, wait_seconds=0.0, earlier_start_seconds=0.0).acquire()
            try:
                deleted += clean_up(folder)
            finally:
                lock.release()
    return deleted


def create_directory(directory: Path, *, field: str) -> None:
    """Create ``directory`` and check that it is writable.

    Raises:
        ConfigError: the directory is not writable (the message names ``field`` as the setting to change), or it
            contains a link, through which the run would write elsewhere.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".writable-"):
            pass
        link = link_in(directory)
    except OSError as error:
        home = Path.home()
        writable = home if os.access(home, os.W_OK) else Path(tempfile.gettempdir())
        raise ConfigError(
            f"{field}: cannot write to {directory} ({error.strerror or error}). Set a directory that this user can "
            f"write to, for example {field}={writable / 'runs'}."
        ) from error
    if link is not None:
        raise ConfigError(f"{link} Remove the link, or choose another {field}.")


def link_in(directory: Path) -> Optional[str]:
    """A sentence about a link to a file in a run's directory. None: there is none."""
    for entry in os.scandir(directory):
        if entry.is_symlink() and not entry.is_dir():
            return f"{entry.path} is a link to {os.readlink(entry.path)}, and the run would write through it."
    return None


def problems_of_copies(files: Sequence[Path]) -> list[str]:
    """Why ``log.files_to_copy`` can't be copied into a run's directory: missing files, and files that would replace one
    another or a file of the run's own. Empty for files that can."""
    problems = [
        f"log.files_to_copy: no such file: {file}. Correct the path or remove it."
        for file in files
        if not file.is_file()
    ]
    names = Counter(file.name for file in files)
    return problems + [
        f"log.files_to_copy: {file} would replace another {file.name} of the run's directory. Rename the file."
        for file in files
        if names[file.name] > 1 or file.name in OWN_FILES
    ]


@contextmanager
def writing_to(directory: Path, *, field: str = "log.log_dir") -> Iterator[None]:
    """A context for code that writes a run's files at its start. ``field``: the setting that moves them to another disk.

    Raises:
        ConfigError: the disk is full or not writable.
    """
    try:
        yield
    except OSError as error:
        free = shutil.disk_usage(directory).free if directory.is_dir() else 0
        raise ConfigError(
            f"The run can't write its files to {directory} ({error.strerror or error}; {free / 1e9:.2f} GB are free). "
            f"Nothing was lost. Free disk space, or set {field} to another disk, and run the same command again."
        ) from error


def timestamp() -> str:
    """The current local time as a version: ``2026-01-31_23-59-59``."""
    return time.strftime("%Y-%m-%d_%H-%M-%S")


def meeting_of(trainer: Any) -> Optional[Place]:
    """This process among those that decide on their own, with the address at which they can exchange values before a process
    group exists, by ``trainer``'s cluster environment. None: no other process decides now.

    torchrun, srun, MPI and others start all ranks at once, each with its rank and the address of the first. Lightning's
    own launcher starts a node's other ranks later from the node's first process, whose environment they inherit, so one
    process per node decides.
    """
    environment = getattr(getattr(trainer, "strategy", None), "cluster_environment", None)
    if environment is None:
        return None
    if environment.creates_processes_externally:
        rank, world_size = environment.global_rank(), environment.world_size()
    else:
        rank, world_size = environment.node_rank(), trainer.num_nodes
    if world_size <= 1:
        return None
    return Place(rank=rank, world_size=world_size, address=environment.main_address, port=environment.main_port)


def agree(value: str, meeting: Optional[Place] = None) -> str:
    """Rank 0's ``value``, on every rank.

    Uses the process group if it exists. Otherwise it uses a store at the rendezvous address, which is available before
    any process group. A process that Lightning's launcher started uses the decision of its parent.

    Args:
        value: This rank's value.
        meeting: The result of `meeting_of`. None: the launcher's variables (`nemo2.base.place`).
    """
    import torch.distributed as dist

    if dist.is_initialized():
        from nemo2.base import ranks

        return ranks.broadcast(value)
    number = str(next(_agreements))
    process, _, decisions = os.environ.get(DECISION_VARIABLE, "").partition(" ")
    if process == str(os.getppid()) and number in (inherited := json.loads(decisions)):
        return inherited[number]
    if meeting is None and (place := here()).launched and place.world_size > 1 and place.address and place.port:
        meeting = place
    if meeting is not None:
        value = _agree_in_store(value, meeting, number)
    # For the processes that Lightning's launcher starts from this process. Other children ignore it.
    own = json.loads(decisions) if process == str(os.getpid()) else {}
    os.environ[DECISION_VARIABLE] = f"{os.getpid()} {json.dumps(own | {number: value})}"
    return value


def _agree_in_store(value: str, meeting: Place, number: str) -> str:
    from torch.distributed.rendezvous import rendezvous

    if not _stores:
        # Kept for the life of the process: if rank 0 hosts the store, the store must outlive the other ranks' reads.
        url = f"tcp://{meeting.address}:{meeting.port}"
        store, _, _ = next(rendezvous(url, meeting.rank, meeting.world_size, timeout=timedelta(minutes=5)))
        _stores.append(store)
    key = f"nemo2/agree/{here().restarts}/{number}"
    store = _stores[0]
    if meeting.rank == 0:
        store.set(key, value)
        # If this process continued and failed, the store would vanish, and the other ranks would fail with an error
        # about the store.
        store.wait([f"{key}/read"])
        return value
    value = store.get(key).decode()
    if store.add(f"{key}/readers", 1) == meeting.world_size - 1:
        store.set(f"{key}/read", "")
    return value
