# SPDX-License-Identifier: Apache-2.0
"""Ships the user's code with a job: the current working tree, the commit, or the output of one of nemo-run's
packagers."""

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Optional

from nemo2.base.errors import ConfigError

Code = Literal["tree", "commit", "none"]
CODES = ("tree", "commit", "none")
SHIPPED = "shipped.json"
MOST_BYTES, MOST_FILES = 200_000_000, 20_000
_NEVER = {"venv", "__pycache__", "node_modules", "nemo_experiments"}


def ship(
    source: Path, target: Path, *, code: Code = "tree", packager: Any = None, leave_out: Sequence[Path] = ()
) -> dict[str, Any]:
    """Copy code from ``source`` into ``target``, and describe it in ``shipped.json`` beside it.

    Args:
        source: The working directory.
        target: A folder that doesn't exist.
        code: "tree": the current files, in a repository those that git doesn't ignore, elsewhere all except hidden
            ones. "commit": the repository's HEAD. "none": nothing; ranks import from their working directory.
        packager: One of nemo-run's packagers, in place of ``code``.
        leave_out: Folders that "tree" leaves out, in addition to jobs, runs and checkpoints of nemo2, which it finds
            by their files. A folder that holds ``source`` has no effect.

    Raises:
        ConfigError: the code is too large for every launch, "commit" outside a repository, or a packager that fails or
            packs nothing.
    """
    target.mkdir(parents=True)
    try:
        root = Path(_git(source, "rev-parse", "--show-toplevel").strip())
    except (OSError, subprocess.CalledProcessError):
        root = None
    description: dict[str, Any] = {"from": str(source), "code": "packager" if packager is not None else code}
    if packager is not None:
        from nemo2.launch.packagers import pack  # nemo-run, which a profile's settings don't load

        pack(packager, source, target)
    elif code == "commit":
        if root is None:
            raise ConfigError(f"code='commit': {source} is not in a git repository. Set code='tree'.")
        if _commit(source) is None:
            raise ConfigError(
                f"code='commit': the repository of {source} has no commit yet. Commit, or set code='tree'."
            )
        archive = subprocess.run(["git", "-C", str(source), "archive", "HEAD"], capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", str(target)], input=archive.stdout, check=True)
    elif code == "tree":
        names = _names(source, in_repository=root is not None, leave_out=leave_out)
        _refuse_too_large(source, names)
        for name in names:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, target / name)
        description["files"] = len(names)
    if root is not None:
        description["commit"] = _commit(source)
        description["changed"] = sorted(line[3:] for line in _git(source, "status", "--porcelain").splitlines())[:100]
    (target.parent / SHIPPED).write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")
    return description


_OUTPUT = (
    {"job.sh", SHIPPED},
    {"job.sh", "lives"},
    {"environment.json", "metrics.jsonl"},
    {"environment.json", "recipe.json"},
    {"manifest.json", "weights"},
)
"""The files by which a folder of a job, of a run and of a checkpoint is known. It has all files of a row."""


def _names(source: Path, *, in_repository: bool, leave_out: Sequence[Path]) -> list[str]:
    """The files of the tree, without nemo2's own output: otherwise each launch would copy all launches before it.
    Output that git tracks is the user's decision."""
    output = {os.path.relpath(folder.resolve(), source.resolve()): True for folder in leave_out}
    output |= {"": False, ".": False}

    def is_output(folder: str) -> bool:
        if folder not in output:
            there = is_output(os.path.dirname(folder))
            output[folder] = there or any(all((source / folder / one).exists() for one in row) for row in _OUTPUT)
        return output[folder]

    if in_repository:
        tracked = _listed(source, "--cached")
        others = _listed(source, "--others", "--exclude-standard")
        names = [*tracked, *(name for name in others if not is_output(os.path.dirname(name)))]
        return [name for name in names if (source / name).is_file()]
    names: list[str] = []
    for folder, folders, files in os.walk(source):
        inside = os.path.relpath(folder, source)
        folders[:] = [
            name
            for name in sorted(folders)
            if name not in _NEVER
            and not name.startswith(".")
            and not is_output(os.path.normpath(os.path.join(inside, name)))
        ]
        if len(names) > MOST_FILES:
            break
        names += [os.path.normpath(os.path.join(inside, name)) for name in sorted(files) if not name.startswith(".")]
    return [name for name in names if (source / name).is_file()]


def _refuse_too_large(source: Path, names: list[str]) -> None:
    size = sum((source / name).stat().st_size for name in names[: MOST_FILES + 1])
    if len(names) > MOST_FILES or size > MOST_BYTES:
        raise ConfigError(
            f"code='tree': {source} holds {len(names)} files of {size / 1e6:.0f} MB, which every launch would copy (at most "
            f"{MOST_FILES} and {MOST_BYTES / 1e6:.0f} MB). Launch from the folder of your code, have git ignore data, or set "
            'code = "none" in the profile.'
        )


def _commit(source: Path) -> Optional[str]:
    """The commit of the repository. None: it has none yet."""
    try:
        return _git(source, "rev-parse", "HEAD").strip()
    except subprocess.CalledProcessError:
        return None


def _listed(source: Path, *which: str) -> list[str]:
    return [name for name in _git(source, "ls-files", *which, "-z").split("\0") if name]


def _git(source: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(source), *arguments], capture_output=True, text=True, check=True).stdout
