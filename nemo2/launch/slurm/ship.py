# SPDX-License-Identifier: Apache-2.0
"""Ships the user's code with a job: the current working tree, the commit, or the output of one of nemo-run's
packagers."""

import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any, Literal, Optional

from nemo2.errors import ConfigError

Code = Literal["tree", "commit", "none"]
CODES = ("tree", "commit", "none")
SHIPPED = "shipped.json"
MOST_BYTES, MOST_FILES = 200_000_000, 20_000
_NEVER = {"venv", "__pycache__", "node_modules", "nemo_experiments"}


def ship(source: Path, target: Path, *, code: Code = "tree", packager: Any = None) -> dict[str, Any]:
    """Copy code from ``source`` into ``target``, and describe it in ``shipped.json`` beside it.

    Args:
        source: The working directory.
        target: A folder that doesn't exist.
        code: "tree": the current files, in a repository those that git doesn't ignore, elsewhere all except hidden
            ones. "commit": the repository's HEAD. "none": nothing; ranks import from their working directory.
        packager: One of nemo-run's packagers, in place of ``code``.

    Raises:
        ConfigError: the code is too large for every launch, or "commit" outside a repository.
    """
    target.mkdir(parents=True)
    root = _repository(source)
    told: dict[str, Any] = {"from": str(source), "code": "packager" if packager is not None else code}
    if packager is not None:
        _unpack(packager.package(source, str(target.parent), "code"), target)
    elif code == "commit":
        if root is None:
            raise ConfigError(f"code='commit': {source} is not in a git repository. Set code='tree'.")
        archive = subprocess.run(["git", "-C", str(source), "archive", "HEAD"], capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", str(target)], input=archive.stdout, check=True)
    elif code == "tree":
        names = _names(source, in_repository=root is not None)
        _refuse_much(source, names)
        for name in names:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, target / name)
        told["files"] = len(names)
    if root is not None:
        told["commit"] = _git(source, "rev-parse", "HEAD").strip()
        told["changed"] = sorted(line[3:] for line in _git(source, "status", "--porcelain").splitlines())[:100]
    (target.parent / SHIPPED).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return told


def _names(source: Path, *, in_repository: bool) -> list[str]:
    if in_repository:
        listed = _git(source, "ls-files", "--cached", "--others", "--exclude-standard", "-z").split("\0")
        return [name for name in listed if name and (source / name).is_file()]
    found: list[str] = []
    for folder, folders, files in os.walk(source):
        folders[:] = sorted(name for name in folders if name not in _NEVER and not name.startswith("."))
        if len(found) > MOST_FILES:
            break
        inside = os.path.relpath(folder, source)
        found += [os.path.normpath(os.path.join(inside, name)) for name in sorted(files) if not name.startswith(".")]
    return [name for name in found if (source / name).is_file()]


def _refuse_much(source: Path, names: list[str]) -> None:
    size = sum((source / name).stat().st_size for name in names[: MOST_FILES + 1])
    if len(names) > MOST_FILES or size > MOST_BYTES:
        raise ConfigError(
            f"code='tree': {source} holds {len(names)} files of {size / 1e6:.0f} MB, which every launch would copy (at most "
            f"{MOST_FILES} and {MOST_BYTES / 1e6:.0f} MB). Launch from the folder of your code, have git ignore data, or set "
            'code = "none" in the profile.'
        )


def _unpack(archive: Any, target: Path) -> None:
    if archive and Path(archive).is_file():
        with tarfile.open(archive) as tar:
            tar.extractall(target, filter="data")
        Path(archive).unlink()


def _repository(source: Path) -> Optional[Path]:
    try:
        found = _git(source, "rev-parse", "--show-toplevel").strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return Path(found)


def _git(source: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(source), *arguments], capture_output=True, text=True, check=True).stdout
