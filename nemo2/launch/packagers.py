# SPDX-License-Identifier: Apache-2.0
"""Checks what nemo-run's packagers ship, and runs one. By default, its executors of Docker and SkyPilot ship the commit of
the working directory's repository."""

import subprocess
import tarfile
from pathlib import Path
from typing import Any

from nemo_run.core.packaging.base import Packager
from nemo_run.core.packaging.git import GitArchivePackager

from nemo2.base.advice import print_warning
from nemo2.base.errors import ConfigError


def check_packaged_commit(executor: Any) -> None:
    """Report the changes that a packager of commits doesn't ship.

    Raises:
        ConfigError: there is no such commit.
    """
    packager = executor.packager
    if not isinstance(packager, GitArchivePackager):
        return
    source, commit = Path(packager.basepath or Path.cwd()), f"{packager.ref}:{packager.subpath}"
    field = f"{type(executor).__name__}.packager=GitArchivePackager"
    try:
        _git(source, "rev-parse", "--verify", commit)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ConfigError(
            f"{field}: {source} is in no git repository with {commit}. Commit your code, or set packager=run.Packager() if "
            "the image has it."
        ) from error
    if changed := [line[3:] for line in _git(source, "status", "--porcelain").splitlines()]:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        print_warning(
            f"{field} ships {packager.ref} without the changes of {', '.join(changed[:3])}{more}. Commit them."
        )


def pack(packager: Any, source: Path, target: Path) -> None:
    """Fill ``target`` with the files of ``source`` that the packager selects. `Packager` itself selects none.

    Raises:
        ConfigError: the packager fails, or its patterns fit no file.
    """
    name = type(packager).__name__
    try:
        archive = packager.package(source, str(target.parent), "code")
    except Exception as error:  # each packager has its own, of shells, git and tar
        raise ConfigError(f"packager={name} fails: {str(error).strip() or type(error).__name__}") from error
    if archive and Path(archive).is_file():
        with tarfile.open(archive) as tar:
            tar.extractall(target, filter="data")
        Path(archive).unlink()
    if type(packager) is not Packager and not any(path.is_file() for path in target.rglob("*")):
        raise ConfigError(f"packager={name} packs no file. Correct {packager!r}.")


def _git(source: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(source), *arguments], capture_output=True, text=True, check=True).stdout
