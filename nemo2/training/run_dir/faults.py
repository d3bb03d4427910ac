# SPDX-License-Identifier: Apache-2.0
"""Fault files: each rank's record of its failure, and the search for the first failure among them.

When one rank fails, the other ranks fail a moment later in the next collective, and usually only their errors are
visible. Each rank therefore writes its error with the time of day. The cause is the earliest error that says more than
that another rank has failed. Imports nothing heavy.
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

from nemo2.base.errors import (
    EXIT_PREEMPTED,
    LOST_PEER,
    ON_ANOTHER_RANK,
    Nemo2Error,
    Preempted,
    RuntimeFault,
    SaveFailed,
)
from nemo2.base.place import here
from nemo2.training.run_dir.environment import redact_text

FAULT_DIR_VARIABLE = "NEMO2_FAULT_DIR"
"""The variable with the folder to which the ranks of a launched run write their errors. The launcher sets it."""

TORCH_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""The variable with the file in which torchrun looks for a rank's error. torchrun sets it."""

HANG = "Hang"
"""The fault kind of a run without progress."""


MENDED_BY_A_START = (HANG, RuntimeFault.__name__, SaveFailed.__name__)
"""The fault kinds of nemo2 that a restart may resolve."""

_step: Optional[int] = None


@dataclass(frozen=True, kw_only=True)
class Fault:
    """The failure of one rank. ``time`` is in seconds since the epoch, ``kind`` is the exception's class name."""

    rank: int
    time: float
    kind: str
    message: str
    traceback: str
    explained: bool
    """Whether the message alone explains the error, as nemo2's own errors do, so that no traceback is needed."""
    step: Optional[int] = None
    """Optimizer steps done. None: training had not begun."""


def install_fault_hook() -> None:
    """Record uncaught exceptions of this process if it is a rank of a launched run. Idempotent.

    The entry points' module calls this on import, so that errors while the recipe is built are recorded too. In a
    process without a launcher it does nothing.

    Raises:
        SystemExit: torchrun has restarted the ranks after an error that would recur, or after they saved and stopped on
            request. The exit code is that of the earlier end.
    """
    if not (os.environ.get(FAULT_DIR_VARIABLE) or os.environ.get(TORCH_VARIABLE)) or not here().launched:
        return
    if getattr(sys.excepthook, "_nemo2_faults", False):
        return
    _refuse_a_start_in_vain()
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        record_fault(error)
        previous(kind, error, trace)

    hook._nemo2_faults = True  # pyright: ignore[reportFunctionMemberAccess]  (a mark for the check above)
    sys.excepthook = hook


def _refuse_a_start_in_vain() -> None:
    directory = os.environ.get(FAULT_DIR_VARIABLE)
    if directory is None or here().restarts == 0:
        return
    for fault in read_faults(directory):
        if fault.kind == Preempted.__name__:
            raise SystemExit(EXIT_PREEMPTED)
        if fault.explained and fault.kind not in MENDED_BY_A_START:
            print(
                f"no restart, because the error would recur: rank {fault.rank}: {fault.message}",
                file=sys.stderr,
                flush=True,
            )
            raise SystemExit(1)


def record_fault(error: BaseException, *, step: Optional[int] = None) -> None:
    """Write ``error`` to the fault directory and, in torchrun's format, to torchrun's error file.

    Never raises, because it runs during another failure.

    Args:
        step: Optimizer steps done. None: the number of an earlier call in this process.
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
    """The error's message, or the line of code that raised it if the message is empty."""
    if words := str(error):
        return words
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "no message"
    return f'no message; raised at File "{frames[-1].filename}", line {frames[-1].lineno}: {frames[-1].line}'


def read_faults(directory: str | os.PathLike[str]) -> list[Fault]:
    """The faults in a fault directory, without unreadable ones: earliest first, and those that only report the failure
    of another rank last.

    All ranks that `HangWatchdog` ended form one fault. Its ``rank`` is the lowest rank that left a sign of life but no
    stacks, or else the rank that wrote its stacks first. Its ``traceback`` holds the stacks of all ranks.
    """
    faults = _hangs(Path(directory))
    for path in sorted(Path(directory).glob("rank-*.json")):
        try:
            faults.append(Fault(**json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError):
            continue
    return sorted(faults, key=lambda fault: (reports_another_rank(fault.message), fault.time))


def reports_another_rank(message: str) -> bool:
    """Whether a fault's message says only that another rank has failed."""
    return any(words in message for words in (*LOST_PEER, ON_ANOTHER_RANK, "A rank ended while"))


def _hangs(directory: Path) -> list[Fault]:
    from nemo2.training.run_dir.hang_diagnosis import describe, read_stacks

    hang = describe(directory)
    if hang is None:
        return []
    rank, ended, message = hang
    stacks = "\n".join(f"rank-{number}:\n{written.text}" for number, written in read_stacks(directory).items())
    return [Fault(rank=rank, time=ended, kind=HANG, message=message, traceback=stacks, explained=True)]
