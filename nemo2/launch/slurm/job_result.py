# SPDX-License-Identifier: Apache-2.0
"""Decides after a life of a job whether the run is done, continues, or has failed for a reason that a restart doesn't
fix.

The job's script runs this module on its node. It prints one word, ``done``, ``again``, ``failed`` or ``cancelled``, and
writes the word with its reason into ``state.json``, which a launcher that follows the run reads. Imports nothing heavy.

- A run that an earlier life has trained to the end, before its node was lost or while it was cut off: done.
- Ranks that saved and stopped on request: again, but not `ASKED` times in a row at one step.
- Ranks that ended because Slurm took a node from them, or the job back: again.
- An error of the settings, the data or the checkpoint: failed, because the next start would meet it too.
- Ranks that Slurm ended before they wrote anything, as at the return of a lost node: again, but not `STALLED` times in
  a row.
- Any other failure (a lost node, a killed rank, a hang, an exception): again, unless an earlier life failed at the same
  step, or `STALLED` lives in a row advanced no further than a life before them. Without a rank's word on its step,
  only the second counts, because the last logged step and the last checkpoint don't tell where the ranks were.
- Ranks that never began to run, and set-up lines of the user's that failed: failed.
- A failure after as many failed starts as the executor allows (``retries``): failed.
- A script that was killed before it could ask: as for any other failure.
- Where this module meets an error of its own: again, but not `STALLED` times in a row.
"""

import argparse
import io
import json
import re
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Literal, Optional, get_args

from nemo2.base.errors import CheckpointError, DataError, Preempted, RunFinished
from nemo2.checkpoint.directory import finished
from nemo2.launch.exit_causes import first_failure
from nemo2.launch.slurm.script import LIVES, STATE
from nemo2.training.run_dir.directory import CHECKPOINTS
from nemo2.training.run_dir.faults import MENDED_BY_A_START, Fault, read_faults
from nemo2.training.run_dir.records import METRICS_FILE, read_metrics, write_text

Cause = Literal["ranks", "setup", "script"]

SIGKILLED = 128 + signal.SIGKILL
STALLED = 3
ASKED = 10
RUN_DIR = "run_dir"
"""A file in the job's folder with the path of the run directory."""
_ENDED_BY_SLURM = ("CANCELLED",)
_TAKEN_BY_SLURM = ("NODE_FAIL", "PREEMPTED", "REQUEUED")
"""States of a job that Slurm itself queues again. Errors of its ranks in these states don't count as failures."""
_CANCELLED = re.compile(r"\*\*\* STEP \S+ ON \S+ CANCELLED AT")


def judge(
    folder: Path,
    *,
    life: int,
    code: int = SIGKILLED,
    state: str = "RUNNING",
    retries: Optional[int] = None,
    cause: Cause = "ranks",
) -> dict[str, Any]:
    """The end of a life: ``verdict``, ``message``, ``step`` (None: no step is known), and ``rank`` if one rank caused
    the end.

    Args:
        folder: The job's folder.
        life: The life's number.
        code: The exit code of srun, or of the set-up lines.
        state: Slurm's current word for the job.
        retries: How often a failed job is started again. None: as long as it makes progress.
        cause: What has ended: the "ranks", the user's "setup" lines before the ranks started, or the job's "script".
    """
    attempt = folder / LIVES / str(life)
    faults = read_faults(attempt / "faults")
    if code == 0 and cause == "ranks":
        return _outcome("done", "trained to the end", faults, folder)
    if life > 0 and faults and faults[0].kind == RunFinished.__name__:
        return _outcome("done", "an earlier start trained to the end", faults, folder)
    stopped = next((fault for fault in faults if fault.kind == Preempted.__name__), None)
    if state.startswith(_ENDED_BY_SLURM):
        return _outcome("cancelled", stopped.message if stopped else "cancelled", faults, folder)
    if stopped is not None and cause == "ranks":
        return _stopped_on_request(_outcome("again", stopped.message, faults, folder), folder)
    if state.startswith(_TAKEN_BY_SLURM) and not (faults and _explained(faults[0])):
        return _outcome("again", f"Slurm took the job from its nodes ({state}).", faults, folder)
    if cause == "setup":
        return _setup_failed(code, folder)
    if cause == "script":
        message, rank = "the job's script was killed, and Slurm ended the ranks with it.", None
    else:
        message, rank = _first_failure(attempt, faults, code)
    outcome = _outcome("again", message, faults, folder, rank=rank)
    failed = {**outcome, "verdict": "failed"}
    if cause == "ranks":
        if not faults and _ended_by_slurm(attempt):
            repeated = _repeats(folder, "ended", STALLED, step=outcome["step"])
            return {**(failed if repeated else outcome), "ended": True}
        if not any(attempt.glob("rank-*.out")) or (faults and _explained(faults[0])):
            return failed
    earlier = [one for one in history(folder) if one.get("failed")]
    if retries is not None and len(earlier) >= retries:
        reason = f"{outcome['message']} {retries + 1} starts have failed (executor.retries={retries})."
    elif faults and cause == "ranks" and any(one.get("step") == outcome["step"] for one in earlier):
        at = "before its first step" if outcome["step"] is None else f"at step {outcome['step']}"
        reason = f"{message} An earlier start also failed {at}, so the job does not start again."
    elif _stalled([*earlier, outcome]):
        reason = f"{outcome['message']} {STALLED} starts in a row made no progress."
    else:
        return {**outcome, "failed": True}
    return {**failed, "message": reason}


def _is_over(folder: Path, life: int) -> bool:
    """Whether the life has its verdict, or another one has begun."""
    return any(one.get("life") == life for one in history(folder)) or (folder / LIVES / str(life + 1)).exists()


def unjudged(folder: Path, error: Exception) -> dict[str, Any]:
    """The outcome of a life that `judge` could not judge: again, but not `STALLED` times in a row."""
    verdict = "failed" if _repeats(folder, "unjudged", STALLED) else "again"
    words = " ".join(str(error).split())
    message = f"The end of this start can't be judged: {type(error).__name__}: {words}."
    return {"verdict": verdict, "message": message, "step": None, "rank": None, "unjudged": True}


def _repeats(folder: Path, mark: str, limit: int, *, step: Optional[int] = None) -> bool:
    """Whether this start is the last of ``limit`` in a row with the ``mark`` in their records, and at this step. Before
    training, no step is known; while the first step runs, it is 0. Both are no progress."""
    before = history(folder)[1 - limit :]
    return sum(one.get(mark, False) and (one["step"] or 0) == (step or 0) for one in before) >= limit - 1


def history(folder: Path) -> list[dict[str, Any]]:
    """The verdicts so far, oldest first. Empty where the file is missing or damaged."""
    try:
        lives = json.loads((folder / STATE).read_text(encoding="utf-8"))["lives"]
        return [live for live in lives if isinstance(live, dict) and "verdict" in live and "step" in live]
    except (OSError, ValueError, LookupError, TypeError):
        return []


def record(folder: Path, life: int, outcome: dict[str, Any]) -> None:
    state = {"again": "continued"}.get(outcome["verdict"], outcome["verdict"])
    lives = [*history(folder), {"life": life, "at": round(time.time(), 1), **outcome}]
    write_text(folder / STATE, json.dumps({"state": state, "lives": lives}, indent=1) + "\n")


def _stopped_on_request(outcome: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The verdict of a life that was asked to stop, unless too many such lives made no progress."""
    outcome = {**outcome, "asked": True}
    if not _repeats(folder, "asked", ASKED, step=outcome["step"]):
        return outcome
    message = f"{outcome['message']} {ASKED} starts in a row were asked to stop at this step. Set a longer time limit."
    return {**outcome, "verdict": "failed", "message": message}


def _explained(fault: Fault) -> bool:
    """Whether a restart would meet the fault too."""
    return fault.explained and fault.kind not in MENDED_BY_A_START


def _ended_by_slurm(life: Path) -> bool:
    """Whether slurmd reports that it cancelled the ranks' step."""
    return any(
        _CANCELLED.search(path.read_text(encoding="utf-8", errors="replace")) for path in life.glob("task-*.out")
    )


def _stalled(failures: list[dict[str, Any]]) -> bool:
    """Whether the last failures advanced no further than the one before them."""
    steps = [-1 if failure["step"] is None else failure["step"] for failure in failures]
    return len(steps) > STALLED and max(steps[-STALLED:]) <= max(steps[:-STALLED])


def _outcome(
    verdict: str, message: str, faults: list[Fault], folder: Path, *, rank: Optional[int] = None
) -> dict[str, Any]:
    steps = [fault.step for fault in faults if fault.step is not None]
    if steps:
        return {"verdict": verdict, "message": message, "step": max(steps), "rank": rank}
    step, unread = _last_step(folder)
    return {"verdict": verdict, "message": f"{message}{unread}", "step": step, "rank": rank}


def _setup_failed(code: int, folder: Path) -> dict[str, Any]:
    """The verdict on set-up lines that have ended the script. SIGTERM comes from Slurm, which wants the node back."""
    if code == 128 + signal.SIGTERM:
        return _stopped_on_request(_outcome("again", "asked to stop during the set-up lines.", [], folder), folder)
    message = (
        f"setup_lines ended with exit code {code} before the ranks started. The job's output, {folder}/job-*.out, shows "
        "which line failed."
    )
    return _outcome("failed", message, [], folder)


def _last_step(folder: Path) -> tuple[Optional[int], str]:
    """The steps that the run directory shows, by its metrics and checkpoints (None: none), and a sentence about what
    can't be read."""
    try:
        directory = Path((folder / RUN_DIR).read_text(encoding="utf-8").strip())
    except FileNotFoundError:  # no rank came far enough to make one
        return None, ""
    except (OSError, ValueError) as error:
        return None, f" {folder / RUN_DIR} can't be read: {error}."
    steps, unread = [], ""
    try:
        if (directory / METRICS_FILE).is_file():
            steps += [record["step"] + 1 for record in read_metrics(directory) if isinstance(record.get("step"), int)]
    except (DataError, OSError, ValueError, TypeError) as error:
        unread = f" The steps logged so far can't be read: {error}"
    try:
        steps += [manifest.step for _, manifest in finished(directory / CHECKPOINTS)]
    except (CheckpointError, OSError, ValueError) as error:
        unread += f" Checkpoints can't be read: {error}"
    return max(steps, default=None), unread


def _first_failure(attempt: Path, faults: list[Fault], code: int) -> tuple[str, Optional[int]]:
    """The first failure among the ranks in a sentence, and its rank."""
    output = "\n".join(
        path.read_text(encoding="utf-8", errors="replace") for path in sorted(attempt.glob("task-*.out"))
    )
    if cause := first_failure(faults, output):
        return cause.message if cause.exit_code > 0 else f"{cause.message}.", cause.rank
    lines = [line for line in output.splitlines() if line.strip()]
    last = f". Last output: {' / '.join(lines[-3:])}" if lines else ""
    return f"the ranks ended with exit code {code} and no error message{last}.", None


def main() -> None:
    parser = argparse.ArgumentParser(description="Judge a life of a job.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--life", type=int, required=True)
    parser.add_argument("--code", type=int, default=SIGKILLED)
    parser.add_argument("--state", default="RUNNING")
    parser.add_argument("--retries", type=int, default=None)
    parser.add_argument("--cause", choices=get_args(Cause), default="ranks")
    arguments = parser.parse_args()
    if arguments.cause == "script" and _is_over(arguments.folder, arguments.life):
        print("judged")
        return
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # the verdict comes after words in any script
    try:
        outcome = judge(**vars(arguments))
    except Exception as error:  # without a verdict, the job would end for good
        traceback.print_exc()
        outcome = unjudged(arguments.folder, error)
    try:
        record(arguments.folder, arguments.life, outcome)
    except OSError as error:
        print(f"{arguments.folder / STATE} can't be written: {error}.")
        if outcome["verdict"] == "again" and arguments.life - len(history(arguments.folder)) >= STALLED:
            outcome = {**outcome, "verdict": "failed"}
    print(outcome["message"])
    print(outcome["verdict"])


if __name__ == "__main__":
    main()
