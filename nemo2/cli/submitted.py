# SPDX-License-Identifier: Apache-2.0
"""Runs that the user submitted to Slurm, from any of the user's shells: their states, logs and reports."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Optional

from nemo2.base.columns import columns
from nemo2.base.errors import ConfigError, DataError, Nemo2Error
from nemo2.base.files import write_file
from nemo2.base.names import did_you_mean
from nemo2.cli.adapter import Result


def submissions() -> list[Any]:
    """The submissions, oldest first."""
    from nemo2.launch.slurm.submission import Submission
    from nemo2.launch.slurm.submission import submissions as folder
    from nemo2.launch.trusted_files import read_trusted

    files = sorted(folder().glob("*.json"), key=lambda file: file.stat().st_mtime)
    effect = "nemo2 logs in to its host and cancels its jobs"
    return [Submission(**json.loads(read_trusted(file, effect=effect))) for file in files]


def find(name: str) -> Optional[Any]:
    """The newest submission of a run's name, a launch's name or a Slurm job id. None: there is none."""
    return next((one for one in reversed(submissions()) if name in (one.name, Path(one.folder).name, *one.jobs)), None)


def require(name: str) -> Any:
    """As `find`. Raises ConfigError if there is none."""
    if (submission := find(name)) is None:
        names = [one.name for one in submissions()]
        near = did_you_mean(name, names)
        raise ConfigError(
            f"no run {name!r} was submitted from this machine{near} `nemo2 runs list --submitted` lists all."
        )
    return submission


def listed(shown: list[Any]) -> Result:
    """The submissions with their states."""
    data = [{**asdict(one), "state": _state(one)[0]} for one in shown]
    none = "No run was submitted to Slurm from this machine. `nemo2 pretrain NAME --executor CLUSTER` submits one."
    rows = [[one["name"], " ".join(one["jobs"]), one["state"], one["folder"]] for one in data]
    return Result(data, "\n".join(columns(rows, head=["name", "jobs", "state", "folder"])) if rows else none)


def status(submission: Any) -> Result:
    """A run's Slurm state, attempts, progress, loss, speed and remaining time."""
    from nemo2.launch.slurm.follow import run_directory
    from nemo2.launch.slurm.progress import progress

    word, record = _state(submission)
    shell = submission.shell()
    reason = _reason(submission, shell, record)
    directory = run_directory(shell, submission.folder)
    far = None if directory is None else progress(shell, directory)
    lives = record.get("lives", [])
    shown = None if far is None else {**asdict(far), "seconds_left": far.seconds_left}
    data = {"state": word, "reason": reason, "lives": lives, "run_directory": directory, "progress": shown}
    lines = [f"{submission.name}: {word} (job {' '.join(submission.jobs)})"]
    lines += [f"  life {life['life']}: {life['verdict']}: {life['message']}" for life in lives]
    place = None if directory is None else f"run directory: {directory}"
    lines += [f"  {line}" for line in (reason, place, far) if line is not None]
    return Result({**asdict(submission), **data}, "\n".join(lines))


def fetch_report(submission: Any, output: Path) -> Path:
    """Download the run's report.html to ``output``."""
    from shlex import quote

    from nemo2.launch.slurm.follow import run_directory

    shell = submission.shell()
    directory = run_directory(shell, submission.folder)
    code, page, _ = (1, "", "") if directory is None else shell.run(f"cat {quote(directory)}/report.html 2>/dev/null")
    if code != 0:
        name = submission.name
        raise DataError(f"{name} has no report yet; `nemo2 runs status {name}` shows its progress.")
    return write_file(output, page)


def log(submission: Any, *, lines: int, follow: bool) -> Result:
    """Print the output of rank 0: the last ``lines``, or with ``follow`` all of it until the run ends."""
    from shlex import quote

    from nemo2.launch.slurm.follow import follow as to_the_end
    from nemo2.launch.slurm.follow import last_life

    shell = submission.shell()
    if follow:
        ending = to_the_end(submission, shell)
        return Result(None, f"{ending.state}: {ending.message}", 0 if ending.state == "done" else 1)
    life = last_life(shell, submission.folder)
    if life is None:
        name = submission.name
        return Result(None, f"{name} hasn't started; `nemo2 runs status {name}` shows its state.")
    place = f"{quote(submission.folder)}/lives/{life}"
    files = f"{place}/task-*.out {place}/rank-00000.err {place}/rank-00000.out"
    return Result(None, shell.run(f"cat {files} | tail -n {lines}")[1].removesuffix("\n"))


def cancel(submission: Any) -> Result:
    """Cancel a run's jobs."""
    from nemo2.launch.slurm import queue

    shell = submission.shell()
    alive = [job for job in submission.jobs if queue.is_active(queue.state(shell, job))]
    queue.cancel(shell, alive)
    text = f"cancelled job {' '.join(alive)}" if alive else f"{submission.name} has ended already"
    return Result({"cancelled": alive}, text)


def _reason(submission: Any, shell: Any, record: dict[str, Any]) -> Optional[str]:
    """Why a run has ended whose last life has no verdict. None: it has one, or the run hasn't ended."""
    from nemo2.launch.slurm import queue
    from nemo2.launch.slurm.follow import CONTINUED, ENDED, ended_by_slurm

    if record.get("state") in ENDED:
        return None
    try:
        words = [queue.state(shell, job) for job in submission.jobs]
        if any(map(queue.is_active, words)):
            return None
        ending = ended_by_slurm(shell, submission, words, record)
    except Nemo2Error:
        return None
    return None if ending.state == CONTINUED else ending.message


def _state(submission: Any) -> tuple[str, dict[str, Any]]:
    from nemo2.launch.slurm import queue
    from nemo2.launch.slurm.follow import ENDED, read_state

    shell = submission.shell()
    record: dict[str, Any] = {}
    word: Optional[str] = None
    try:
        record = read_state(shell, submission.folder)
        word = record.get("state")
        if word not in ENDED:
            words = [queue.state(shell, job) for job in submission.jobs]
            words = [queue.with_hold(shell, *one) for one in zip(submission.jobs, words, strict=True)]
            word = next((one for one in words if queue.is_active(one.partition(",")[0])), word or words[-1])
    except Nemo2Error as error:
        return f"unknown: {error}", record
    return str(word), record
