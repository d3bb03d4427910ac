# SPDX-License-Identifier: Apache-2.0
"""The lineage of checkpoints: the id of a run, which all of its checkpoints carry, and the runs that it continues.

``.run`` in a directory of checkpoints names the run that currently writes there. A run that resumes from a checkpoint
in its own directory keeps the checkpoint's id. A run that starts from the beginning, or from a checkpoint elsewhere,
gets a new id and has the other run among its ancestors. Checkpoints without an id, from older versions, belong to the
run of their directory. A directory holds the checkpoints of one run: another run that would write there is refused.
"""

import json
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Optional

from nemo2.base.advice import new_name
from nemo2.base.errors import CheckpointError
from nemo2.base.files import replacing
from nemo2.checkpoint.directory import Manifest, finished, read_manifest
from nemo2.checkpoint.foreign_files import read_json

RUN_FILE = ".run"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run, by its id, and the runs that it continues, oldest first."""

    id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    lineage: tuple[str, ...] = ()
    returned_to: tuple[float, ...] = ()
    """Of a `Manifest`."""

    @classmethod
    def of(cls, manifest: Optional[Manifest]) -> Optional["Run"]:
        """The run that saved a checkpoint. None: unknown."""
        if manifest is None or not manifest.run:
            return None
        return cls(id=manifest.run, lineage=tuple(manifest.lineage), returned_to=tuple(manifest.returned_to))

    def signature(self) -> dict[str, Any]:
        """The fields of a `Manifest` with these values."""
        return {"run": self.id, "lineage": list(self.lineage), "returned_to": list(self.returned_to)}


def run_of(directory: Path) -> Optional[Run]:
    """The run that ``directory`` belongs to. None: unknown."""
    file = directory / RUN_FILE
    try:
        data = read_json(file)
        ids = {"id": str(data["id"]), "lineage": tuple(map(str, data["lineage"]))}
        return Run(**ids, returned_to=tuple(map(float, data.get("returned_to", ()))))
    except (CheckpointError, KeyError, TypeError, ValueError):
        return None


def run_from(directory: Path, checkpoint: Optional[Path]) -> Run:
    """The run that writes to ``directory`` if it starts from ``checkpoint``. None: it starts from the beginning, as a
    new run.

    Raises:
        CheckpointError: ``directory`` holds checkpoints of another run, which this run could replace.
    """
    before, manifest = run_of(directory), read_manifest(checkpoint) if checkpoint is not None else None
    continues = checkpoint is not None and checkpoint.parent.resolve() == directory.resolve()
    if checkpoint is None:
        run = Run()
    elif continues:
        run = Run.of(manifest) or before or Run()
    else:
        ancestors = () if manifest is None else (*manifest.lineage, *filter(None, [manifest.run]))
        continues = before is not None and bool(ancestors) and before.lineage == ancestors
        run = before if before is not None and continues else Run(lineage=ancestors)
    others = [item for item in finished(directory) if not belongs(item[1], run) or not (continues or item[1].run)]
    if others:
        path, theirs = others[-1]
        raise another_run(directory, f"checkpoints ({path.name})", theirs.run, run)
    return run


def another_run(directory: Path, results: str, owner: str, run: Run) -> CheckpointError:
    """The error that ``directory`` holds results of the run ``owner``, not of ``run``. "": a run without an id."""
    return CheckpointError(
        f"{directory} holds {results} of run {owner or 'without an id'}, but this run is {run.id}. nemo2 neither replaces "
        "nor deletes the results of another run. To continue that run, set resume.resume_if_exists=True, or set "
        f"resume.resume_from_path to one of its checkpoints. To start another run, {new_name()}, log.version or "
        "log.explicit_log_dir, or move the results of the other run to another directory."
    )


def begin(directory: Path, checkpoint: Optional[Path], *, requested: bool = False) -> Run:
    """The run of `run_from`, which is recorded in ``directory``. Only the process with the lock calls it. Raises as
    `run_from`; the directory is then unchanged. ``requested``: the user set ``checkpoint`` as ``resume.resume_from_path``, to
    which the run returns if it is its own."""
    run, before = run_from(directory, checkpoint), run_of(directory)
    manifest = read_manifest(checkpoint) if checkpoint is not None and requested else None
    if manifest is not None and manifest.run == run.id:
        run = replace(run, returned_to=(*(run if before is None else before).returned_to, manifest.saved_at))
    if run != before:
        _record(directory, run)
    return run


def why_writing_is_refused(directory: Path, results: Path, checkpoint: Path) -> Optional[str]:
    """Why the run of ``checkpoint`` must not write ``results`` below ``directory``, as a sentence: the directory belongs to
    another run, or the results exist and no run is known. None: it may, and the directory is its own from now on."""
    run, owner = Run.of(read_manifest(checkpoint)), run_of(directory)
    if run is None:
        return None
    if owner is None and results.exists():
        return f"{results} exists, and it isn't known that run {run.id} wrote it."
    if owner is not None and owner.id != run.id:
        return f"{directory} belongs to run {owner.id}, but this run is {run.id}."
    if owner is None:
        directory.mkdir(parents=True, exist_ok=True)
        _record(directory, run)
    return None


def _record(directory: Path, run: Run) -> None:
    with replacing(directory / RUN_FILE, by_user=False) as temporary:
        temporary.write_text(json.dumps(asdict(run)) + "\n", encoding="utf-8")


def belongs(manifest: Manifest, run: Optional[Run]) -> bool:
    """Whether a checkpoint belongs to ``run``, as far as both are known."""
    return run is None or not manifest.run or manifest.run == run.id


def own(checkpoints: Iterable[tuple[Path, Manifest]], run: Optional[Run]) -> list[tuple[Path, Manifest]]:
    """The items of ``checkpoints`` that belong to ``run``."""
    return [item for item in checkpoints if belongs(item[1], run)]


def own_finished(directory: Path) -> list[tuple[Path, Manifest]]:
    """The finished checkpoints in ``directory`` of the run it belongs to, oldest step first."""
    return own(finished(directory), run_of(directory))
