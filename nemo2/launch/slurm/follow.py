# SPDX-License-Identifier: Apache-2.0
"""Follows a submitted run from here: rank 0's output, each life's end, and the end of the run.

Leaving is safe: the run belongs to Slurm, and this module only reads.
"""

import json
import sys
import time
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple, Optional

from nemo2.base.errors import RuntimeFault
from nemo2.launch.slurm import queue
from nemo2.launch.slurm.job_result import RUN_DIR
from nemo2.launch.slurm.script import LIVES, STATE
from nemo2.launch.slurm.shell import RemoteLines, Shell
from nemo2.launch.slurm.submission import Submission
from nemo2.launch.stream import RunDisplay

ENDED = ("done", "failed", "cancelled")
CONTINUED = "continued"
"""The run has saved, but no job continues it: there is no requeueing, and no further link of a chain."""
_GONE_LOOKS = 3
"""Consecutive polls without the job before it counts as ended. A requeue passes through states that squeue doesn't
list."""


class Ending(NamedTuple):
    """``state`` is one of `ENDED`, or `CONTINUED`."""

    state: str
    message: str = ""
    rank: Optional[int] = None


def follow(submission: Submission, shell: Shell) -> Ending:
    """Show a run until it has ended for good."""
    pause = 1.0 if shell.local else 5.0
    display = RunDisplay(Path(submission.folder))
    shown = _Shown(shell, submission, display)
    gone = 0
    ending: Optional[Ending] = None
    try:
        while ending is None:
            state = read_state(shell, submission.folder)
            shown.update(state)
            if state.get("state") in ENDED:
                last = state["lives"][-1]
                ending = Ending(state["state"], last.get("message", ""), last.get("rank"))
                break
            try:
                words = [queue.state(shell, job) for job in submission.jobs]
            except RuntimeFault as error:
                shown.say(f"{error}; looking again")
                time.sleep(10 * pause)
                continue
            shown.queue([queue.with_hold(shell, *one) for one in zip(submission.jobs, words, strict=True)])
            gone = 0 if any(map(queue.is_active, words)) else gone + 1
            if gone >= _GONE_LOOKS:
                ending = ended_by_slurm(shell, submission, words, state)
            time.sleep(pause)
        return ending
    finally:
        display.close(succeeded=ending is not None and ending.state == "done")


def read_state(shell: Shell, folder: str) -> dict[str, Any]:
    """The state that the lives so far have written. {}: the first has not ended yet."""
    _, text, _ = shell.run(f"cat {quote(folder)}/{STATE} 2>/dev/null")
    try:
        return json.loads(text)
    except ValueError:
        return {}


def run_directory(shell: Shell, folder: str) -> Optional[str]:
    _, text, _ = shell.run(f"cat {quote(folder)}/{RUN_DIR} 2>/dev/null")
    return text.strip() or None


def last_life(shell: Shell, folder: str) -> Optional[int]:
    _, names, _ = shell.run(f"ls {quote(folder)}/{LIVES} 2>/dev/null")
    numbers = [int(name) for name in names.split() if name.isdecimal()]
    return max(numbers, default=None)


class _Shown:
    """The part of the output that has been shown already."""

    def __init__(self, shell: Shell, submission: Submission, display: RunDisplay) -> None:
        self._shell, self._submission, self._display = shell, submission, display
        self._life: Optional[int] = None
        self._streams: dict[str, RemoteLines] = {}
        self._num_verdicts = 0
        self._queued: list[str] = []

    def update(self, state: dict[str, Any]) -> None:
        self._lines()
        newest = last_life(self._shell, self._submission.folder)
        if newest is not None and newest != self._life:
            self._life = newest
            life = f"{self._submission.folder}/{LIVES}/{newest}/rank-00000"
            self._streams = {
                "stdout": RemoteLines(self._shell, f"{life}.out"),
                "stderr": RemoteLines(self._shell, f"{life}.err"),
            }
            self._lines()
        for verdict in state.get("lives", [])[self._num_verdicts :]:
            self._num_verdicts += 1
            if verdict["verdict"] == "again":
                self.say(f"{verdict['message']} The job continues by itself.")

    def queue(self, words: list[str]) -> None:
        if words != self._queued:
            self._queued = words
            self.say(", ".join(f"job {job} is {word}" for job, word in zip(self._submission.jobs, words, strict=True)))

    def say(self, text: str) -> None:
        self._display.take("stdout", text)
        sys.stdout.flush()

    def _lines(self) -> None:
        for stream, lines in self._streams.items():
            for line in lines.read():
                self._display.take(stream, line)


def ended_by_slurm(shell: Shell, submission: Submission, words: list[str], state: dict[str, Any]) -> Ending:
    """The end of a run whose jobs are over without a verdict: Slurm cancelled it while it waited or ran out of time, or
    something killed its script and ranks together.

    Args:
        words: Slurm's word for each job.
        state: What `read_state` has returned.
    """
    word = next((word for word in reversed(words) if word != "COMPLETED"), "COMPLETED")
    if word.startswith("CANCELLED"):
        return Ending("cancelled", f"job {submission.jobs[-1]} was cancelled")
    lives = state.get("lives", [])
    last_started = last_life(shell, submission.folder)
    if state.get("state") == CONTINUED and lives[-1].get("life") == last_started:
        return Ending(CONTINUED, lives[-1]["message"])
    _, tail, _ = shell.run(f"tail -qn 5 {quote(submission.folder)}/job-*.out 2>/dev/null")
    last = " / ".join(line for line in tail.splitlines() if line.strip())
    how = (
        "before its script started"
        if last_started is None
        else f"in life {last_started}, before its script could say why"
    )
    again = f" `scontrol requeue {submission.jobs[-1]}` or the same command resumes the run from its last checkpoint."
    return Ending(
        "failed",
        f"Slurm ended job {submission.jobs[-1]} {how}: {word}.{again if last_started is not None else ''}"
        f"{f' Last output: {last}' if last else ''}",
    )
