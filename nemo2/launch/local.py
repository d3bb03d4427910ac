# SPDX-License-Identifier: Apache-2.0
"""Processes of a run on this machine: their Python, threads and variables, and how to end them without orphans."""

import contextlib
import os
import shutil
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from nemo2.base.import_path import own_folders, path_variables, requested_path, write_hook
from nemo2.base.place import usable_cores
from nemo2.training.run_dir.environment import is_secret_name
from nemo2.training.run_dir.parent_watchdog import is_running, process_identity
from nemo2.training.run_dir.records import write_text

if TYPE_CHECKING:
    import psutil

_KNOWN_WARNINGS = (
    # Megatron-Core logs this on import, ten times per rank. `environment.json` states it once.
    "ignore:Transformer Engine and Apex are not installed:UserWarning",
    "ignore:Apex is not installed:UserWarning",
    "ignore:The pynvml package is deprecated:FutureWarning",
)

LAUNCHER_FILE = "launcher"
"""The file in a launch's folder with the launching process and, in a second line, its host."""
_STAGING_SECONDS = 86400.0
_STOP_SECONDS = 45.0
"""The time for processes to end. torchrun gives its ranks 30 s after a SIGTERM."""


def rank_variables(*, ranks: int, staging: Path, requested: Mapping[str, str]) -> dict[str, str]:
    """The variables of torchrun and its ranks in addition to this process's environment. ``requested`` takes precedence.

    ``ranks`` is the number of processes on this machine.
    """
    variables = {
        # nemo-run starts the first `torchrun` on the path, which must be this interpreter's.
        "PATH": command_path(staging),
        # A rank that restarts would meet the dead rank's address in the shared store.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "PYTHONWARNINGS": ",".join([*filter(None, [os.environ.get("PYTHONWARNINGS")]), *_KNOWN_WARNINGS]),
    }
    if "OMP_NUM_THREADS" not in os.environ:
        variables["OMP_NUM_THREADS"] = str(max(1, int(usable_cores() / ranks)))
    write_hook(staging)
    others = {name: value for name, value in requested.items() if name not in ("PATH", "PYTHONPATH")}
    if "PATH" in requested:
        variables["PATH"] += os.pathsep + requested["PATH"]
    return variables | path_variables(staging, requested=requested_path(requested), own=own_folders()) | others


def command_path(staging: Path) -> str:
    """Folders for the front of PATH so that ``python`` and ``torchrun`` are this interpreter's.

    An interpreter without a ``torchrun`` script beside it (torch from another folder, say) gets one in ``staging``.
    """
    beside = Path(sys.executable).parent
    if all(os.access(beside / name, os.X_OK) for name in ("python", "torchrun")):
        return str(beside)
    folder = staging / "bin"
    folder.mkdir(parents=True, exist_ok=True)
    for name, module in (("python", ""), ("torchrun", " -m torch.distributed.run")):
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}"{module} "$@"\n')
        script.chmod(script.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    return os.pathsep.join([str(folder), str(beside)])


def split_secrets(variables: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """``(open, secret)``: nemo-run writes an executor's variables to disk, so secret ones are separated."""
    secret = {name: value for name, value in variables.items() if is_secret_name(name)}
    return {name: value for name, value in variables.items() if name not in secret}, secret


def keep_private(folder: Path) -> None:
    """Make nemo-run write a launch's settings where only this user can read them: the folder is created with mode
    0700. On a shared home an existing folder of another user stays unchanged."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)


def child_processes() -> set[int]:
    """The process ids of all descendants of this process."""
    import psutil

    return {process.pid for process in psutil.Process().children(recursive=True)}


def stop_processes(pids: Iterable[int], *, grace_seconds: float = _STOP_SECONDS) -> None:
    """End these processes and their children: SIGTERM to the root of each tree, and SIGKILL to the processes that
    remain.

    torchrun forwards the signal to its ranks, so each receives it once. Processes that have ended meanwhile don't
    matter.
    """
    import psutil

    everyone: dict[int, psutil.Process] = {}
    try:
        inner: set[int] = set()
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = everyone[pid] = psutil.Process(pid)
                children = {child.pid: child for child in process.children(recursive=True)}
                inner |= children.keys()
                everyone |= children
        for pid in everyone.keys() - inner:
            _quietly(everyone[pid].terminate)
        deadline = time.monotonic() + grace_seconds
        # Polled rather than waited for, because waiting would take their exit codes from their parents.
        while any(map(_is_alive, everyone.values())) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:  # also on a second Ctrl-C
        for process in everyone.values():
            _quietly(process.kill)


def claim_staging(staging: Path) -> None:
    """Protect a launch's folder from other launches while this process lives. Written in one rename, because they may look at
    any moment."""
    write_text(staging / LAUNCHER_FILE, f"{process_identity()}\n{socket.gethostname()}")


def sweep_staging(folder: Path) -> list[Path]:
    """Delete the leftovers of killed launches in ``folder``. Returns the deleted paths."""
    removed = leftovers(folder)
    for staging in removed:
        shutil.rmtree(staging, ignore_errors=True)
    return removed


def leftovers(folder: Path) -> list[Path]:
    """The folders of killed launches in ``folder``. A folder without a process, of a launch on a cluster or, in a home that hosts
    share, of another host counts after a day."""
    folders = []
    for staging in sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()):
        with contextlib.suppress(FileNotFoundError):  # another launch has just deleted it
            modified = staging.stat().st_mtime
            try:
                process, _, host = (staging / LAUNCHER_FILE).read_text(encoding="utf-8").partition("\n")
            except OSError:
                process, host = "", None
            here = host in ("", socket.gethostname())  # an earlier version wrote no host
            over = not is_running(process) if here else time.time() - modified > _STAGING_SECONDS
            if over:
                folders.append(staging)
    return folders


def _is_alive(process: "psutil.Process") -> bool:
    import psutil

    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _quietly(action: Callable[[], None]) -> None:
    import psutil

    with contextlib.suppress(psutil.Error):
        action()
