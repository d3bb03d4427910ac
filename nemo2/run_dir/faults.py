# SPDX-License-Identifier: Apache-2.0
"""Fault files: a rank's record of its failure, and the search for the first failure among the ranks'.

When one rank fails, the others fail a moment later in the next collective, and theirs is the error one usually sees.
Each rank therefore writes its own with the time of day; the earliest is the cause. Imports nothing heavy.
"""

import json
import os
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Optional

from nemo2.errors import EXIT_PREEMPTED, Nemo2Error, Preempted, RuntimeFault, SaveFailed
from nemo2.place import here
from nemo2.run_dir.environment import redact_text
from nemo2.run_dir.stalls import describe

FAULT_DIR_VARIABLE = "NEMO2_FAULT_DIR"
"""Where the ranks of a launched run write their errors; set by the launcher."""

TORCH_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""Where torchrun looks for a rank's error; set by torchrun."""

HANG = "Hang"
"""The kind of the fault of a run in which nothing happened any more."""


MENDED_BY_A_START = (HANG, RuntimeFault.__name__, SaveFailed.__name__)
"""Kinds of faults of ours that another start may not meet."""

_step: Optional[int] = None


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One rank's end. ``time`` is in seconds since the epoch; ``kind`` the exception's class name."""

    rank: int
    time: float
    kind: str
    message: str
    traceback: str
    explained: bool
    """Whether the message alone tells what is wrong (our own errors), so that no traceback need be shown."""
    step: Optional[int] = None
    """Optimizer steps done; None where no training had begun."""


def install_fault_hook() -> bool:
    """Have an uncaught exception of this process written down, if it is a rank of a launched run.

    Called where the entry points are imported, so that an error while the recipe is built is seen too. Does nothing,
    and returns False, in a process that no launcher has started. Idempotent.

    Raises:
        SystemExit: torchrun has started the ranks again after an error that they would meet again, or after they had saved and
            stopped because they were asked to; with the exit code of that.
    """
    if not (os.environ.get(FAULT_DIR_VARIABLE) or os.environ.get(TORCH_VARIABLE)) or not here().launched:
        return False
    if getattr(sys.excepthook, "_nemo2_faults", False):
        return True
    _refuse_a_start_in_vain()
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        record_fault(error)
        previous(kind, error, trace)

    hook._nemo2_faults = True  # pyright: ignore[reportFunctionMemberAccess]  (a mark for the check above)
    sys.excepthook = hook
    return True


def _refuse_a_start_in_vain() -> None:
    directory = os.environ.get(FAULT_DIR_VARIABLE)
    if directory is None or here().restarts == 0:
        return
    for fault in read_faults(directory):
        if fault.kind == Preempted.__name__:
            raise SystemExit(EXIT_PREEMPTED)
        if fault.explained and fault.kind not in MENDED_BY_A_START:
            print(f"not started again: rank {fault.rank}: {fault.message}", file=sys.stderr, flush=True)
            raise SystemExit(1)


def record_fault(error: BaseException, *, step: Optional[int] = None) -> None:
    """Write ``error`` to the fault directory and, in torchrun's own form, to torchrun's error file.

    Never raises: it runs while something else is already failing.

    Args:
        step: Optimizer steps done. None: what an earlier call for this process said.
    """
    global _step
    _step = _step if step is None else step
    if isinstance(error, KeyboardInterrupt | SystemExit) and not isinstance(error, Preempted):
        return
    fault = Fault(
        rank=here().rank,
        time=time.time(),
        kind=type(error).__name__,
        message=redact_text(error.message if isinstance(error, Preempted) else words_of(error)),
        traceback=redact_text("".join(traceback.format_exception(error))),
        explained=isinstance(error, Nemo2Error | Preempted),
        step=_step,
    )
    try:
        if directory := os.environ.get(FAULT_DIR_VARIABLE):
            Path(directory).mkdir(parents=True, exist_ok=True)
            (Path(directory) / f"rank-{fault.rank}.json").write_text(json.dumps(asdict(fault)), encoding="utf-8")
        if file := os.environ.get(TORCH_VARIABLE):
            details = {"py_callstack": fault.traceback, "timestamp": str(int(fault.time))}
            message = {"message": f"{fault.kind}: {fault.message}", "extraInfo": details}
            Path(file).write_text(json.dumps({"message": message}), encoding="utf-8")
    except OSError:
        pass


def words_of(error: BaseException) -> str:
    """Its message; for one that has none, the line of code that raised it."""
    if words := str(error):
        return words
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "no message"
    return f'no message; raised at File "{frames[-1].filename}", line {frames[-1].lineno}: {frames[-1].line}'


def read_faults(directory: str | os.PathLike[str]) -> list[Fault]:
    """The faults of a fault directory, earliest first; an unreadable one is left out.

    Ranks that `HangWatchdog` ended are one fault, with the stacks of all: of the rank that was silent, or of the first of them.
    """
    faults = _hangs(Path(directory))
    for path in sorted(Path(directory).glob("rank-*.json")):
        try:
            faults.append(Fault(**json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError):
            continue
    return sorted(faults, key=lambda fault: fault.time)


def stacks_file(directory: str | os.PathLike[str], rank: int) -> Path:
    """Where a rank's stacks go when it hangs."""
    return Path(directory) / f"rank-{rank}.stacks"


def _hangs(directory: Path) -> list[Fault]:
    found = describe(directory)
    if found is None:
        return []
    rank, ended, words = found
    files = [path for path in sorted(directory.glob("rank-*.stacks")) if path.stat().st_size]
    stacks = "\n".join(f"{path.stem}:\n{path.read_text(encoding='utf-8', errors='replace')}" for path in files)
    return [Fault(rank=rank, time=ended, kind=HANG, message=words, traceback=stacks, explained=True)]
