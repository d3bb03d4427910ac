# SPDX-License-Identifier: Apache-2.0
"""Explains why a run failed: finds the first failure among the ranks in the files of the ranks and of torchrun."""

import re
from pathlib import Path

from nemo2.base.errors import RuntimeFault
from nemo2.launch.exit_causes import first_failure, killed, rank_exits
from nemo2.launch.stream import agent_logs, without_rank
from nemo2.training.run_dir.faults import read_faults

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

    After the causes of `first_failure`: the last traceback of the rank that torchrun saw failing first, or the end of
    torchrun's own output.
    """
    report = "\n".join(_error_lines(log_dir))
    end = next(iter(rank_exits(report)), None)
    cause = first_failure(read_faults(fault_dir), report) or (killed(end) if end and end.code < 0 else None)
    if cause is not None:
        message, rank, code, details = cause
        if code < 0:
            details = "\n".join(rank_output(log_dir, rank)[-_TAIL_LINES:])
    else:
        rank, code = end or (None, None)
        output = rank_output(log_dir, rank)
        kind, words, details = last_traceback(output)
        who = "the run" if rank is None else f"rank {rank}"
        if kind:
            message = f"{who} failed first: {kind}: {words}" if words else f"{who} failed first: {kind}"
        else:
            details = "\n".join(output[-_TAIL_LINES:])
            ended = "" if code is None else f" with exit code {code}"
            message = f"{who} ended{ended} without an error message. Its last output was:\n{details}"
    message = message.rstrip()
    period = "" if message.endswith((".", "!", "?")) else "."
    message = f"{message}{period} Logs of all ranks: {log_dir}"
    return RankFailure(message, rank=rank, exit_code=code, details=details, log_dir=log_dir)


def rank_output(log_dir: Path, rank: int | None) -> list[str]:
    """The standard error of one rank. For a ``rank`` of None or without output: that of all ranks and of torchrun."""
    lines = _error_lines(log_dir)
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


def _error_lines(log_dir: Path) -> list[str]:
    paths = agent_logs(log_dir, "stderr")
    return [line for path in paths for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
