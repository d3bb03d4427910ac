# SPDX-License-Identifier: Apache-2.0
"""``nemo2 jobs``: runs that the user submitted to Slurm, from any of the user's shells."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from nemo2.cli.commands import App, not_with
from nemo2.cli.flags import AsJson, print_json

Name = Annotated[str, typer.Argument(help="A run's name (its newest launch), a launch's name, or a Slurm job id.")]
Lines = Annotated[int, typer.Option("--lines", min=1, help="Number of last lines to print.")]

jobs = App(no_args_is_help=True, help="List, follow and cancel the runs that you submitted to Slurm.")


def register(app: typer.Typer) -> None:
    app.add_typer(jobs, name="jobs", epilog="Example: nemo2 jobs logs llama3_70b --follow")


@jobs.command("list", epilog="Example: nemo2 jobs list")
def list_jobs(as_json: AsJson = False) -> None:
    """List the runs that you submitted from this machine, with their states."""
    from nemo2.columns import columns

    told = [{**asdict(one), "state": _state(one)[0]} for one in _submissions()]
    if as_json:
        print_json(told)
        return
    if not told:
        print("No run was submitted to Slurm from this machine. `nemo2 pretrain NAME --executor CLUSTER` submits one.")
        return
    rows = [[one["name"], " ".join(one["jobs"]), one["state"], one["folder"]] for one in told]
    print("\n".join(columns(rows, head=["name", "jobs", "state", "folder"])))


@jobs.command("status", epilog="Example: nemo2 jobs status llama3_70b")
def status(name: Name, as_json: AsJson = False) -> None:
    """Print a run's Slurm state, attempts, progress, loss, speed and remaining time."""
    from nemo2.launch.slurm.follow import run_directory
    from nemo2.launch.slurm.progress import progress

    submission = _find(name)
    word, told = _state(submission)
    shell = submission.shell()
    reason = _reason(submission, shell, told)
    directory = run_directory(shell, submission.folder)
    far = None if directory is None else progress(shell, directory)
    lives = told.get("lives", [])
    if as_json:
        shown = None if far is None else {**asdict(far), "seconds_left": far.seconds_left}
        told = {"state": word, "reason": reason, "lives": lives, "run_directory": directory, "progress": shown}
        print_json({**asdict(submission), **told})
        return
    print(f"{submission.name}: {word} (job {' '.join(submission.jobs)})")
    for life in lives:
        print(f"  life {life['life']}: {life['verdict']}: {life['message']}")
    if reason:
        print(f"  {reason}")
    if directory is not None:
        print(f"  run directory: {directory}")
    if far is not None:
        print(f"  {far}")


@jobs.command("report", epilog="Example: nemo2 jobs report llama3_70b --output report.html")
def report(
    name: Name,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")] = Path("report.html"),
) -> None:
    """Download a run's report.html. The run writes it at every save and at its end."""
    from shlex import quote

    from nemo2.errors import DataError
    from nemo2.launch.slurm.follow import run_directory

    submission = _find(name)
    shell = submission.shell()
    directory = run_directory(shell, submission.folder)
    code, page, _ = (1, "", "") if directory is None else shell.run(f"cat {quote(directory)}/report.html 2>/dev/null")
    if code != 0:
        raise DataError(f"{submission.name} has no report yet; `nemo2 jobs status {name}` shows its progress.")
    output.write_text(page, encoding="utf-8")
    print(output)


@jobs.command("logs", epilog="Example: nemo2 jobs logs llama3_70b --follow")
def logs(
    name: Name,
    follow: Annotated[
        bool,
        typer.Option("--follow", "-f", help="Keep printing until the run ends. Ctrl-C stops printing, not the run."),
    ] = False,
    lines: Lines = 40,
) -> None:
    """Print the output of rank 0."""
    from shlex import quote

    from nemo2.launch.slurm.follow import follow as to_the_end
    from nemo2.launch.slurm.follow import last_life

    submission = _find(name)
    shell = submission.shell()
    not_with("follow", "lines")
    if follow:
        ending = to_the_end(submission, shell)
        print(f"{ending.state}: {ending.message}")
        raise typer.Exit(0 if ending.state == "done" else 1)
    life = last_life(shell, submission.folder)
    if life is None:
        print(f"{submission.name} hasn't started; `nemo2 jobs status {name}` shows its state.")
    else:
        place = f"{quote(submission.folder)}/lives/{life}"
        files = f"{place}/task-*.out {place}/rank-00000.err {place}/rank-00000.out"
        _, text, _ = shell.run(f"cat {files} | tail -n {lines}")
        print(text, end="")


@jobs.command("cancel", epilog="Example: nemo2 jobs cancel llama3_70b")
def cancel(name: Name) -> None:
    """Cancel a run. Its ranks save a checkpoint first, and the run doesn't restart."""
    from nemo2.launch.slurm import queue

    submission = _find(name)
    shell = submission.shell()
    alive = [job for job in submission.jobs if queue.lives(queue.state(shell, job))]
    queue.cancel(shell, alive)
    print(f"cancelled job {' '.join(alive)}" if alive else f"{submission.name} has ended already")


def _submissions() -> list[Any]:
    """The submissions, oldest first."""
    from nemo2.launch.slurm.start import Submission, submissions
    from nemo2.launch.trusted_files import read_trusted

    files = sorted(submissions().glob("*.json"), key=lambda file: file.stat().st_mtime)
    effect = "nemo2 logs in to its host and cancels its jobs"
    return [Submission(**json.loads(read_trusted(file, effect=effect))) for file in files]


def _find(name: str) -> Any:
    from nemo2.errors import ConfigError
    from nemo2.names import did_you_mean

    known = _submissions()
    for submission in reversed(known):
        if name in (submission.name, submission.folder.rpartition("/")[2], *submission.jobs):
            return submission
    raise ConfigError(
        f"no run {name!r} was submitted from this machine{did_you_mean(name, [one.name for one in known])}"
    )


def _reason(submission: Any, shell: Any, told: dict[str, Any]) -> Optional[str]:
    """Why a run has ended whose last life has no verdict. None: it has one, or the run hasn't ended."""
    from nemo2.errors import Nemo2Error
    from nemo2.launch.slurm import queue
    from nemo2.launch.slurm.follow import CONTINUED, ENDED, ended_by_slurm

    if told.get("state") in ENDED:
        return None
    try:
        words = [queue.state(shell, job) for job in submission.jobs]
        if any(map(queue.lives, words)):
            return None
        ending = ended_by_slurm(shell, submission, words, told)
    except Nemo2Error:
        return None
    return None if ending.state == CONTINUED else ending.message


def _state(submission: Any) -> tuple[str, dict[str, Any]]:
    from nemo2.errors import Nemo2Error
    from nemo2.launch.slurm import queue
    from nemo2.launch.slurm.follow import ENDED, read_state

    shell = submission.shell()
    told: dict[str, Any] = {}
    word: Optional[str] = None
    try:
        told = read_state(shell, submission.folder)
        word = told.get("state")
        if word not in ENDED:
            words = [queue.state(shell, job) for job in submission.jobs]
            words = [queue.with_hold(shell, *one) for one in zip(submission.jobs, words, strict=True)]
            word = next((one for one in words if queue.lives(one.partition(",")[0])), word or words[-1])
    except Nemo2Error as error:
        return f"unknown: {error}", told
    return str(word), told
