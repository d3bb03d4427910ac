# SPDX-License-Identifier: Apache-2.0
"""Explains why a run failed: finds the first failure among the ranks in the files of the ranks and of torchrun."""

import re
from pathlib import Path

from nemo2.errors import EXIT_PREEMPTED, Preempted, RuntimeFault
from nemo2.launch.deaths import DECISIVE_SIGNALS, Death, deaths_in, killed_words
from nemo2.launch.stream import agent_logs, without_rank
from nemo2.run_dir.faults import HANG, Fault, read_faults

_ERROR_LINE = re.compile(r"^(?P<kind>[A-Za-z_][\w.]*(Error|Exception|Fault|Interrupt|Exit)\w*)(: (?P<message>.*))?$")
_TAIL_LINES = 15


class RankFailure(RuntimeFault):
    """A launched run failed. The message names the first rank that failed, its error and the folder of the logs.

    Args:
        message: The text of the error.
        rank: The first rank that failed. None: unknown.
        exit_code: The exit code of that rank. None: unknown.
        details: The traceback, or the last lines of that rank's output. Empty: neither is available on this machine.
        log_dir: The folder with the raw output of every rank.
    """

    def __init__(self, message: str, *, rank: int | None, exit_code: int | None, details: str, log_dir: Path) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code
        self.details = details
        self.log_dir = log_dir


def explain_failure(*, fault_dir: Path, log_dir: Path) -> RankFailure:
    """The first failure of a run, as an exception to raise.

    The search order is: a hang, whose silent rank is killed by others; a rank killed by a signal; ranks that saved and
    stopped on request; the earliest error that a rank wrote down; the last traceback of the rank that torchrun saw
    failing first; the end of torchrun's own output.
    """
    deaths, faults = reported_deaths(log_dir), read_faults(fault_dir)
    if hang := next((fault for fault in faults if fault.kind == HANG), None):
        return _raised(hang, log_dir)
    for death in deaths:
        if -death.code in DECISIVE_SIGNALS:
            return _killed(death, log_dir)
    if faults:
        if preempted := next((fault for fault in faults if fault.kind == Preempted.__name__), None):
            text = _with_logs(preempted.message, log_dir)
            return RankFailure(text, rank=None, exit_code=EXIT_PREEMPTED, details="", log_dir=log_dir)
        return _raised(faults[0], log_dir)
    if deaths and deaths[0].code < 0:
        return _killed(deaths[0], log_dir)
    rank = deaths[0].rank if deaths else None
    output = rank_output(log_dir, rank)
    kind, message, details = last_traceback(output)
    who = "the run" if rank is None else f"rank {rank}"
    code = deaths[0].code if deaths else None
    ended = "" if code is None else f" with exit code {code}"
    if kind:
        text = f"{who} failed first: {kind}: {message}" if message else f"{who} failed first: {kind}"
    else:
        details = "\n".join(output[-_TAIL_LINES:])
        text = f"{who} ended{ended} without an error message. Its last output was:\n{details}"
    return RankFailure(_with_logs(text, log_dir), rank=rank, exit_code=code, details=details, log_dir=log_dir)


def _killed(death: Death, log_dir: Path) -> RankFailure:
    text = killed_words(death)
    details = "\n".join(rank_output(log_dir, death.rank)[-_TAIL_LINES:])
    return RankFailure(
        _with_logs(text, log_dir), rank=death.rank, exit_code=death.code, details=details, log_dir=log_dir
    )


def _raised(fault: Fault, log_dir: Path) -> RankFailure:
    text = f"{fault.kind}: {fault.message}" if fault.kind == HANG else _first(fault)
    return RankFailure(
        _with_logs(text, log_dir), rank=fault.rank, exit_code=1, details=fault.traceback, log_dir=log_dir
    )


def _first(fault: Fault) -> str:
    return f"rank {fault.rank} failed first: {fault.kind}: {fault.message}"


def _with_logs(text: str, log_dir: Path) -> str:
    end = "" if text.rstrip().endswith((".", "!", "?")) else "."
    return f"{text.rstrip()}{end} Logs of all ranks: {log_dir}"


def reported_deaths(log_dir: Path) -> list[Death]:
    """Torchrun's failure report, root cause first. Empty if torchrun wrote none."""
    text = "\n".join(line for path in agent_logs(log_dir, "stderr") for line in _lines(path))
    return deaths_in(text)


def rank_output(log_dir: Path, rank: int | None) -> list[str]:
    """The standard error of one rank. For a ``rank`` of None or without output: that of all ranks and of torchrun."""
    lines = [line for path in agent_logs(log_dir, "stderr") for line in _lines(path)]
    own = [text for number, text in map(without_rank, lines) if number == rank and rank is not None]
    return own or [without_rank(line)[1] for line in lines]


def last_traceback(lines: list[str]) -> tuple[str, str, str]:
    """``(kind, message, text)`` of the last Python traceback in ``lines``. Empty strings without a traceback."""
    starts = [number for number, line in enumerate(lines) if line.startswith("Traceback (most recent call last):")]
    if not starts:
        return "", "", ""
    block = lines[starts[-1] :]
    for number, line in enumerate(block[1:], start=1):
        if match := _ERROR_LINE.match(line):
            return match["kind"].rsplit(".", 1)[-1], match["message"] or "", "\n".join(block[: number + 1])
    return "", "", "\n".join(block[:_TAIL_LINES])


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines()
