# SPDX-License-Identifier: Apache-2.0
"""``nemo2 jobs``: runs that were handed to Slurm, from any shell of the user who did."""

import json
from typing import Annotated, Any, Optional

import typer

Name = Annotated[str, typer.Argument(help="A run's name, for its newest launch, or a launch's own, or a job's number.")]
Lines = Annotated[int, typer.Option("--lines", min=1, help="How many of rank 0's last lines.")]

jobs = typer.Typer(no_args_is_help=True, help="Runs on Slurm: list, status, logs, cancel.")


def register(app: typer.Typer) -> None:
    app.add_typer(jobs, name="jobs", epilog="Example: nemo2 jobs logs llama3_70b --follow")


@jobs.command("list", epilog="Example: nemo2 jobs list")
def list_jobs() -> None:
    """Jobs that were submitted from here, with their states."""
    from nemo2.columns import columns

    rows = []
    for submission in _submissions():
        rows.append([submission.name, " ".join(submission.jobs), _state(submission)[0], submission.folder])
    print("\n".join(columns(rows, head=["name", "jobs", "state", "folder"])))


@jobs.command("status", epilog="Example: nemo2 jobs status llama3_70b")
def status(name: Name) -> None:
    """Slurm's state of a run, its lives, its last step, its loss and speed."""
    from nemo2.launch.slurm.follow import run_directory

    submission = _find(name)
    word, told = _state(submission)
    print(f"{submission.name}: {word} (job {' '.join(submission.jobs)})")
    for life in told.get("lives", []):
        print(f"  life {life['life']}: {life['verdict']}: {life['message']}")
    shell = submission.shell()
    directory = run_directory(shell, submission.folder)
    if directory is None:
        return
    print(f"  run directory: {directory}")
    from shlex import quote

    _, line, _ = shell.run(f"tail -n 1 {quote(directory)}/metrics.jsonl 2>/dev/null")
    if line.strip():
        record = json.loads(line)
        shown = ("step", "reduced_train_loss", "val_loss", "train_step_timing", "tokens_per_second")
        print("  " + ", ".join(f"{key}={record[key]}" for key in shown if key in record))


@jobs.command("logs", epilog="Example: nemo2 jobs logs llama3_70b --follow")
def logs(
    name: Name,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Until the run ends; Ctrl-C leaves it alone.")] = False,
    lines: Lines = 40,
) -> None:
    """The output of rank 0."""
    from shlex import quote

    from nemo2.launch.slurm.follow import follow as to_the_end
    from nemo2.launch.slurm.follow import last_life

    submission = _find(name)
    shell = submission.shell()
    if follow:
        ending = to_the_end(submission, shell)
        print(f"{ending.state}: {ending.message}")
        raise typer.Exit(0 if ending.state == "done" else 1)
    life = last_life(shell, submission.folder)
    if life is None:
        print(f"{submission.name} has not begun; `nemo2 jobs status {name}` tells how it is.")
        return
    place = f"{quote(submission.folder)}/lives/{life}"
    _, text, _ = shell.run(f"cat {place}/task-*.out {place}/rank-00000.err {place}/rank-00000.out | tail -n {lines}")
    print(text, end="")


@jobs.command("cancel", epilog="Example: nemo2 jobs cancel llama3_70b")
def cancel(name: Name) -> None:
    """End a run: its ranks save, and it doesn't come back."""
    from nemo2.launch.slurm import queue

    submission = _find(name)
    shell = submission.shell()
    alive = [job for job in submission.jobs if queue.lives(queue.state(shell, job))]
    queue.cancel(shell, alive)
    print(f"cancelled job {' '.join(alive)}" if alive else f"{submission.name} has ended already")


def _submissions() -> list[Any]:
    """Oldest first."""
    from nemo2.launch.slurm.start import Submission, submissions

    files = sorted(submissions().glob("*.json"), key=lambda file: file.stat().st_mtime)
    return [Submission(**json.loads(file.read_text(encoding="utf-8"))) for file in files]


def _find(name: str) -> Any:
    from nemo2.errors import ConfigError
    from nemo2.names import did_you_mean

    known = _submissions()
    for submission in reversed(known):
        if name in (submission.name, submission.folder.rpartition("/")[2], *submission.jobs):
            return submission
    raise ConfigError(f"no run {name!r} was submitted from here{did_you_mean(name, [one.name for one in known])}")


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
            word = next((one for one in words if queue.lives(one)), word or words[-1])
    except Nemo2Error as error:
        return f"can't be asked: {error}", told
    return str(word), told
