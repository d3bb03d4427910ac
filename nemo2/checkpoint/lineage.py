# SPDX-License-Identifier: Apache-2.0
"""The lineage of checkpoints: the id of a run, which all of its checkpoints carry, and the runs that it continues.

``.run`` in a directory of checkpoints names the run that currently writes there. A run that resumes from a checkpoint
in its own directory keeps the checkpoint's id. A run that starts from the beginning, or from a checkpoint elsewhere,
gets a new id and has the other run among its ancestors. Checkpoints without an id, from older versions, belong to the
run of their directory.
"""

import json
import os
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional

from nemo2.checkpoint.directory import Manifest, finished, read_manifest
from nemo2.checkpoint.foreign_files import read_json
from nemo2.errors import CheckpointError

RUN_FILE = ".run"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run, by its id, and the runs that it continues, oldest first."""

    id: str
    lineage: tuple[str, ...] = ()

    def signature(self) -> dict[str, Any]:
        """The fields of a `Manifest` with these values."""
        return {"run": self.id, "lineage": list(self.lineage)}


def run_of(directory: Path) -> Optional[Run]:
    """The run that ``directory`` belongs to. None: unknown."""
    file = directory / RUN_FILE
    try:
        data = read_json(file)
        return Run(id=str(data["id"]), lineage=tuple(map(str, data["lineage"])))
    except (CheckpointError, KeyError, TypeError):
        return None


def begin(directory: Path, checkpoint: Optional[Path]) -> Run:
    """The run that will write to ``directory``, which is recorded there. Only the process with the lock calls it.

    Args:
        checkpoint: The checkpoint that the run resumes from. None: it starts from the beginning, as a new run.
    """
    before = run_of(directory)
    manifest = read_manifest(checkpoint) if checkpoint is not None else None
    if checkpoint is None:
        run = Run(id=_new_id())
    elif checkpoint.parent.resolve() == directory.resolve():
        own = manifest.run if manifest is not None else ""
        run = (
            Run(id=own, lineage=tuple(manifest.lineage))
            if manifest is not None and own
            else before or Run(id=_new_id())
        )
    else:
        ancestors = () if manifest is None else (*manifest.lineage, *filter(None, [manifest.run]))
        again = before is not None and bool(ancestors) and before.lineage == ancestors
        run = before if before is not None and again else Run(id=_new_id(), lineage=ancestors)
    if run != before:
        temporary = directory / f"{RUN_FILE}-{uuid.uuid4().hex[:8]}"
        temporary.write_text(json.dumps(asdict(run)) + "\n")
        os.replace(temporary, directory / RUN_FILE)
    return run


def belongs(manifest: Manifest, run: Optional[Run]) -> bool:
    """Whether a checkpoint belongs to ``run``, as far as both are known."""
    return run is None or not manifest.run or manifest.run == run.id


def own(checkpoints: Iterable[tuple[Path, Manifest]], run: Optional[Run]) -> list[tuple[Path, Manifest]]:
    """The items of ``checkpoints`` that belong to ``run``."""
    return [item for item in checkpoints if belongs(item[1], run)]


def own_finished(directory: Path) -> list[tuple[Path, Manifest]]:
    """The finished checkpoints in ``directory`` of the run it belongs to, oldest step first."""
    return own(finished(directory), run_of(directory))


def _new_id() -> str:
    return uuid.uuid4().hex[:12]
